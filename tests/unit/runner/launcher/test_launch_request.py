"""What the launcher is asked to start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from runner.config.schema import Config
from runner.journal.attempts import AttemptSpec, Job
from runner.launcher.launch_request import RankSetup, launch_request, launcher_environment
from runner.peers.messages import Begin, read_by_member


def launched(
    job: Job, spec: AttemptSpec, committed_step: int = -1, config: Config | None = None, **environment: str
) -> dict[str, Any]:
    """What ranks are started with."""
    directory: Any = SimpleNamespace(logs=Path("logs"), config=Path("config"), cache=Path("cache"))
    setup = RankSetup(2, 0, False, "agent", "events", "logs/attempt-1", committed_step)
    request = launch_request(
        spec, config=config or Config(), directory=directory, job=job, run_id="run", setup=setup, inherited=environment
    )
    ranks: dict[str, Any] = request["spec"]
    return ranks


def settings_of(ranks: dict[str, Any]) -> RankSettings:
    return RankSettings.from_json(ranks["env"][SETTINGS_ENV])


def test_ranks_learn_where_to_start_from_and_whether_the_job_may_differ() -> None:
    def start(job: Job, spec: AttemptSpec) -> tuple[str, bool]:
        settings = settings_of(launched(job, spec))
        return settings.resume_from, settings.allow_changes

    assert start(Job(), AttemptSpec(1, 1)) == ("", False)
    own = Job(resume_from="/own", allow_changes=True)
    assert start(own, AttemptSpec(1, 1, resume_from="/first")) == ("/own", True)
    # Another node's ranks learn it from the first one.
    spec = AttemptSpec(1, 1, resume_from="/first", allow_changes=True)
    (begin,) = [read_by_member(Begin(spec=spec).encode())]
    assert isinstance(begin, Begin)
    assert start(Job(), begin.spec) == ("/first", True)


def test_an_attempt_reaches_the_ranks_as_one_typed_value() -> None:
    spec = AttemptSpec(3, 1, 2, "41-45,60-60", "2:90", "run", lost_steps=7, reached=70)
    config = Config.model_validate({"checkpoint": {"location": "/store", "local_tier": "/nvme"}})
    assert settings_of(launched(Job(), spec, config=config)) == RankSettings(
        agent_socket="agent",
        attempt=3,
        location="/store",
        local_tier="/nvme",
        resume="auto",
        lineage="run",
        num_failures=2,
        observed_s=90.0,
        lost_steps=7,
        reached_step=70,
        micro_batch_divisor=2,
        skipped_steps=((41, 45), (60, 60)),
    )


@pytest.mark.parametrize(
    ("attempt", "committed_step", "resume_from", "resumes"),
    [(1, -1, "", False), (2, -1, "", True), (1, 20, "", True), (2, 20, "/stock", False)],
)
def test_base_weights_are_left_out_where_all_are_restored(
    attempt: int, committed_step: int, resume_from: str, resumes: bool
) -> None:
    """A stock Trainer's checkpoint may lack some, which then were those of the base model."""
    spec = AttemptSpec(attempt, 1, resume_from=resume_from)
    assert launched(Job(), spec, committed_step)["resumes"] is resumes


def test_ranks_of_one_node_listen_on_loopback_unless_the_user_says_otherwise() -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [launched(Job(), AttemptSpec(1, 1))["env"][name] for name in names] == ["lo", "lo"]
    assert "GLOO_SOCKET_IFNAME" not in launched(Job(), AttemptSpec(1, 1), GLOO_SOCKET_IFNAME="eth0")["env"]


def test_the_launcher_inherits_the_environment_but_for_torchruns_own_variables() -> None:
    inherited = {"RANK": "3", "WORLD_SIZE": "4", "HOME": "/root", "OMP_NUM_THREADS": "7"}
    environment = launcher_environment(Config(), "run/0", ("one", "two"), inherited)
    assert environment["RUNNER_PRELOAD"] == "one two"
    assert not {"RANK", "WORLD_SIZE"} & environment.keys()
    assert (environment["HOME"], environment["OMP_NUM_THREADS"]) == ("/root", "7")
    assert launcher_environment(Config(), "run/0", (), {})["OMP_NUM_THREADS"] == "1"
    alone = Config.model_validate({"launch": {"nproc_per_node": 1}})
    assert "OMP_NUM_THREADS" not in launcher_environment(alone, "run/0", (), {})
    exact = Config.model_validate({"launch": {"nproc_per_node": 1}, "elastic": {"mode": "exact"}})
    assert launcher_environment(exact, "run/0", (), {})["OMP_NUM_THREADS"] == "1"
