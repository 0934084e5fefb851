"""What the launcher loads before ranks are forked, its environment, and its request for an attempt.

Loading transformers takes four seconds of processor time and TRL another one, which a bare loop need not wait for. Only
what can be read in the script's text counts: where that leaves a doubt, transformers is loaded, and TRL is not, since
frameworks change transformers before they import TRL.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpointing.agent.protocol import Message
from checkpointing.host.environment import CADENCE, SETTINGS_ENV, RankSettings
from runner.config.load import TORCHRUN_VARIABLES
from runner.config.schema import Config, LaunchConfig
from runner.journal.attempts import AttemptSpec, Job
from runner.journal.run_directory import RunDirectory
from runner.launcher.rendezvous import Meeting
from runner.program.program import Program
from runner.system.processes import PRELOAD_ENV, RUN_ID_ENV

# Names of packages that import neither transformers nor trl, besides the standard library.
_LIGHT = {"torch", "numpy", "tqdm", "yaml", "psutil", "safetensors", "torchvision", "pandas", "pyarrow", "rich"}
_HEAVY = {"transformers", "datasets", "accelerate", "tokenizers"}
# Ways to import what the text does not name.
_HIDDEN = ("import_module", "__import__", "exec(", "runpy")
_MAX_FILES = 100
# Variables that libraries read while they are imported: set later, they have no effect.
_VARIABLES = re.compile(r"[\"']((?:HF|HUGGINGFACE|TRANSFORMERS|DATASETS|ACCELERATE|TRL)_[A-Z_]+)[\"']")

# accelerate imports it when training begins.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
EVERYTHING = ("transformers.trainer", "datasets", "trl.trainer.sft_trainer", "runner.training.job", _HOOKS)
_OF_TRAINER = ("transformers.trainer", "datasets", "checkpointing.transformers", _HOOKS)
_OF_LOOP = ("checkpointing.manager.manager",)
_LOOPBACK = "127.0.0.1"


def modules_to_preload(program: Program | None) -> tuple[str, ...]:
    """Return the modules to load before ranks are forked, for a user's program; None is the bundled job."""
    if program is None:
        return EVERYTHING
    if program.file is None:
        return _OF_TRAINER
    try:
        if variables_set_by(program):
            return _OF_LOOP
        found = set(_imported(program.file))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return _OF_TRAINER
    packages = {name.partition(".")[0] for name in found} - sys.stdlib_module_names - _LIGHT - {"checkpointing"}
    if "trl" in packages and packages <= _HEAVY | {"trl", "peft"}:
        return EVERYTHING
    return _OF_TRAINER if packages or "checkpointing.transformers" in found else _OF_LOOP


def variables_set_by(program: Program | None) -> list[str]:
    """Return the environment variables that a program's text sets, and that libraries read when they are imported."""
    if program is None or program.file is None:
        return []
    try:
        texts = [text for text, _ in _texts(program.file)]
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []
    return sorted(
        {name for text in texts if "environ" in text or "putenv" in text for name in _VARIABLES.findall(text)}
    )


def _imported(script: Path) -> Iterator[str]:
    """Yield the names of the modules that a script, and the files in its folder that it imports, import.

    Raises:
        OSError: A file cannot be read.
        ValueError: Something may be imported that the text does not name.
        SyntaxError: A file is not Python.
    """
    for text, names in _texts(script):
        if any(word in text for word in _HIDDEN):
            raise ValueError("imports that the text does not show")
        yield from names


def _texts(script: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the text of a script, and of the files in its folder that it imports, with what else each imports."""
    waiting, seen = [script], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if len(seen) > _MAX_FILES:
            raise ValueError("too many files")
        text = path.read_text(encoding="utf-8")
        others: list[str] = []
        for name in _names(ast.parse(text)):
            local = _local_files(script.parent, name)
            waiting += local
            others += [] if local else [name]
        yield text, others


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError("a relative import, which depends on how the file was imported")
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _local_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a module in the script's folder, with those of the packages around it."""
    parts = name.split(".")
    found: list[Path] = []
    for count in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:count])
        found += [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found


def launcher_environment(
    config: Config, mark: str, preload: Sequence[str], inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the launcher, which the ranks inherit; for `mark`, see `processes.mark`."""
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


def launch_request(
    spec: AttemptSpec,
    *,
    config: Config,
    directory: RunDirectory,
    job: Job,
    run_id: str,
    nproc: int,
    accelerators: int,
    cold: bool,
    agent_socket: str,
    event_socket: str,
    log_dir: Path,
    committed_step: int,
    inherited: Mapping[str, str],
) -> Message:
    """Return the request that has the launcher start the ranks of an attempt.

    `accelerators` is 0 on a CPU, and `committed_step` -1 if there is none; with `cold`, ranks are fresh interpreters
    instead of forks of a preloaded one.
    """
    launch = config.launch
    settings = _rank_settings(spec, config=config, job=job, agent_socket=agent_socket)
    return {
        "run_id": run_id,
        "attempt": spec.attempt,
        "nnodes": spec.nnodes,
        "nproc_per_node": nproc,
        "meeting": asdict(_meeting(spec, launch)),
        "cold": cold,
        "log_dir": str(log_dir),
        "spec": {
            "env": {
                **(_on_loopback(inherited) if spec.run_nodes == 1 else {}),
                SETTINGS_ENV: settings.to_json(),
            },
            "events": event_socket,
            "config": str(directory.config),
            "cache": str(directory.cache),
            "accelerators": accelerators,
            # A checkpoint that a stock Trainer wrote need not hold every weight.
            "resumes": (spec.attempt > 1 or committed_step >= 0) and not settings.resume_from,
            "resilient": config.resume.resilient,
            "program": job.program.to_json() if job.program is not None else None,
        },
    }


def _meeting(spec: AttemptSpec, launch: LaunchConfig) -> Meeting:
    timeout_s = launch.rendezvous_timeout_s
    if spec.run_nodes == 1:
        # Loopback: no other host may connect, and a pod's name may not resolve.
        return Meeting(_LOOPBACK, 0, is_host=True, bind=_LOOPBACK, own="", place=0, nnodes=1, timeout_s=timeout_s)
    host, port = launch.rendezvous_address
    return Meeting(
        spec.leader_host or host,
        port,
        is_host=launch.node_rank == spec.leader,
        bind=(spec.leader_host or launch.peer_bind) if launch.peer_bind is not None else None,
        own=launch.local_addr or "",
        place=sorted(spec.nodes).index(launch.node_rank),
        nnodes=spec.nnodes,
        timeout_s=timeout_s,
    )


def preparation(config: Config, directory: RunDirectory) -> dict[str, str]:
    """Return the request that has the launcher prepare the data of the bundled job."""
    files = {"config": directory.config, "cache": directory.cache, "log": directory.logs / "prepare.log"}
    return {"limit_s": str(config.launch.rendezvous_timeout_s), **{name: str(path) for name, path in files.items()}}


def _rank_settings(spec: AttemptSpec, *, config: Config, job: Job, agent_socket: str) -> RankSettings:
    num_failures, _, observed_s = spec.failure_history.partition(":")
    return RankSettings(
        agent_socket=agent_socket,
        attempt=spec.attempt,
        node_rank=config.launch.node_rank,
        location=config.checkpoint_location,
        local_tier=config.checkpoint.local_tier or "",
        resume="auto",
        verify=config.resume.verify,
        resume_from=job.resume_from or spec.resume_from,
        allow_changes=job.allow_changes or spec.allow_changes,
        lineage=spec.lineage,
        num_failures=int(num_failures),
        observed_s=max(float(observed_s), 0.0),
        lost_steps=spec.lost_steps,
        reached_step=spec.reached,
        micro_batch_divisor=spec.divisor,
        planned_ranks=spec.planned_ranks,
        cadence=_cadence(config) if job.program is not None else {},
        is_exact=config.elastic.mode == "exact",
        virtual_ranks=config.elastic.virtual_ranks or 0,
        skipped_steps=tuple(_window(text) for text in spec.skipped.split(",") if text),
    )


def _cadence(config: Config) -> dict[str, Any]:
    """Return what the user has said of intervals, for a program, which has its own; the bundled job reads them."""
    # A recorded configuration says everything, and most of it as it is by itself.
    own = type(config.checkpoint)()
    said = {name: getattr(config.checkpoint, name) for name in CADENCE}
    return {name: value for name, value in said.items() if value != getattr(own, name)}


def _window(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)


def _on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that have the ranks of a single node listen on the loopback device, unless they are set."""
    return {name: "lo" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in environment}
