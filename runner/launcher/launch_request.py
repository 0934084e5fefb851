"""The launcher's environment, and its request for an attempt. Pure: no process, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpointing.agent.protocol import Message
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from runner.config.schema import Config
from runner.config.variables import TORCHRUN_VARIABLES
from runner.journal.attempts import AttemptSpec, Job
from runner.journal.run_directory import RunDirectory
from runner.system.processes import PRELOAD_ENV, RUN_ID_ENV


def launcher_environment(
    config: Config, mark: str, preload: Sequence[str], inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the launcher, which the ranks inherit.

    Args:
        config: The resolved configuration.
        mark: Identifies the run's processes; see `processes.mark`.
        preload: Modules to load before ranks are forked.
        inherited: The environment of this process.
    """
    environment = dict(inherited)
    environment[RUN_ID_ENV] = mark
    environment[PRELOAD_ENV] = " ".join(preload)
    # Ranks share the cores. This is torchrun's own default, which has to be set before torch is loaded. It has none for
    # a single rank, whose kernels would add in another order than those of several.
    if config.launch.nproc_per_node != 1 or config.elastic.mode == "exact":
        environment.setdefault("OMP_NUM_THREADS", "1")
    # torchrun sets these for the ranks; inherited values would contradict it.
    for name in TORCHRUN_VARIABLES:
        environment.pop(name, None)
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Libraries ask for GPUs when they are imported, in the process that ranks are forked from. With this variable
    # torch asks NVML, which leaves CUDA uninitialized; otherwise no forked rank could use it.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # A restart should not count as a download.
    environment.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    return environment


@dataclass(frozen=True)
class RankSetup:
    """What ranks need to know of this node.

    Attributes:
        nproc: Ranks on this node.
        accelerators: GPUs that torch sees; 0 on a CPU.
        cold: Whether ranks are fresh interpreters instead of forks of a preloaded one.
        agent_socket: Path of the checkpoint agent's socket.
        event_socket: Path of the socket on which ranks report to this runner.
        log_dir: Folder for the ranks' output.
        committed_step: Newest committed step, -1 if there is none.
    """

    nproc: int
    accelerators: int
    cold: bool
    agent_socket: str
    event_socket: str
    log_dir: str
    committed_step: int


def launch_request(
    spec: AttemptSpec,
    *,
    config: Config,
    directory: RunDirectory,
    job: Job,
    run_id: str,
    setup: RankSetup,
    inherited: Mapping[str, str],
) -> Message:
    """Return the request that has the launcher start the ranks of an attempt.

    Args:
        spec: What the attempt is to be.
        config: The resolved configuration.
        directory: The run's folder.
        job: What runs.
        run_id: Identity of the run.
        setup: What ranks need to know of this node.
        inherited: The environment of this process.
    """
    launch = config.launch
    settings = rank_settings_of(spec, config=config, job=job, agent_socket=setup.agent_socket)
    # A run that may have several nodes uses their addresses also while it has one.
    endpoint, own = launch.rendezvous(spec.run_nodes, spec.leader_host)
    return {
        "run_id": run_id,
        "attempt": spec.attempt,
        "nnodes": spec.nnodes,
        "may_have_several": spec.run_nodes > 1,
        "nproc_per_node": setup.nproc,
        "rdzv_backend": launch.rdzv_backend if spec.run_nodes > 1 else "c10d",
        "rdzv_endpoint": endpoint,
        "is_host": launch.node_rank == spec.leader,
        "local_addr": own,
        "join_timeout_s": launch.rendezvous_timeout_s,
        "cold": setup.cold,
        "log_dir": setup.log_dir,
        "spec": {
            "env": {
                **(_on_loopback(inherited) if spec.run_nodes == 1 else {}),
                SETTINGS_ENV: settings.to_json(),
            },
            "events": setup.event_socket,
            "config": str(directory.config),
            "cache": str(directory.cache),
            "accelerators": setup.accelerators,
            # A checkpoint that a stock Trainer wrote need not hold every weight.
            "resumes": (spec.attempt > 1 or setup.committed_step >= 0) and not settings.resume_from,
            "script": job.script,
            "args": list(job.args),
        },
    }


def preparation(config: Config, directory: RunDirectory) -> dict[str, str]:
    """Return the request that has the launcher prepare the data of the bundled job.

    Args:
        config: The resolved configuration.
        directory: The run's folder.
    """
    files = {"config": directory.config, "cache": directory.cache, "log": directory.logs / "prepare.log"}
    return {"limit_s": str(config.launch.rendezvous_timeout_s), **{name: str(path) for name, path in files.items()}}


def rank_settings_of(spec: AttemptSpec, *, config: Config, job: Job, agent_socket: str) -> RankSettings:
    """Return the settings with which a node's ranks run an attempt.

    Args:
        spec: What the attempt is to be.
        config: The resolved configuration.
        job: What runs.
        agent_socket: Path of the checkpoint agent's socket.
    """
    num_failures, _, observed_s = spec.failure_history.partition(":")
    return RankSettings(
        agent_socket=agent_socket,
        attempt=spec.attempt,
        node_rank=config.launch.node_rank,
        location=config.checkpoint_location,
        local_tier=config.checkpoint.local_tier or "",
        resume="auto",
        resume_from=job.resume_from or spec.resume_from,
        allow_changes=job.allow_changes or spec.allow_changes,
        lineage=spec.lineage,
        num_failures=int(num_failures),
        observed_s=max(float(observed_s), 0.0),
        lost_steps=spec.lost_steps,
        reached_step=spec.reached,
        micro_batch_divisor=spec.divisor,
        planned_ranks=spec.planned_ranks,
        is_exact=config.elastic.mode == "exact",
        virtual_ranks=config.elastic.virtual_ranks or 0,
        skipped_steps=tuple(_window(text) for text in spec.skipped.split(",") if text),
    )


def _window(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)


def _on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that have the ranks of a single node listen on the loopback device, unless they are set."""
    return {name: "lo" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in environment}
