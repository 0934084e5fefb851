"""Random sequences of faults against what restarts a runner.

Each ends in `done`, or where the documents say that it needs a human; never in waiting for ever, never with work lost.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from unit.deploy.controllers import (
    COLUMNS,
    DEPLOY,
    FINAL,
    KILLED,
    PLATFORMS,
    RENDERED,
    Controller,
    End,
    KubernetesJobs,
    pod_failure_action,
)
from unit.deploy.run_model import ElasticWorld, World, random_world

from runner.errors import ExitCode

# 100,000 and more: CONTROLLER_SEQUENCES=100000 pytest tests/unit/deploy
SEQUENCES = int(os.environ.get("CONTROLLER_SEQUENCES", "13000"))
PER_PLATFORM = SEQUENCES // len(PLATFORMS)
# What the table of deploy/README.md names.
HUMAN = {*(f"exit code {code}" for code in FINAL), "failures spent"}


MEANING = {
    0: "done",
    2: "usage",
    74: "storage failed",
    75: "checkpointed: start me again",
    76: "restarts spent without a new checkpoint",
    78: "deterministic: it would fail the same way again",
    79: "no progress",
    80: "bad node: start me on another one",
    81: "checkpoints exist, none is valid",
}


def table() -> str:
    """Exit code by controller, as the model decides."""
    lines = [["code", "meaning", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    for code in ExitCode:
        lines.append([str(int(code)), MEANING[code], *(make().decision(int(code)) for make in COLUMNS.values())])
    killed = [make().decision(KILLED) for make in COLUMNS.values()]
    lines.append([f"{KILLED}, or evicted", "killed from outside", *killed])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def test_the_documented_table_is_that_of_the_model() -> None:
    """WRITE_TABLE=1 writes it."""
    readme = DEPLOY / "README.md"
    text = readme.read_text()
    begin = text.index("| code | meaning |")
    end = begin + re.match(r"(\|.*\n)+", text[begin:]).end()  # type: ignore[union-attr]
    if os.environ.get("WRITE_TABLE"):
        readme.write_text(text[:begin] + table() + text[end:])
    else:
        assert text[begin:end] == table()


def documented() -> dict[int, dict[str, str]]:
    """The table of deploy/README.md: exit code → controller → decision."""
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table().splitlines()]
    return {int(re.findall(r"\d+", cells[0])[0]): dict(zip(header, cells, strict=True)) for cells in lines}


def test_all_kubernetes_jobs_have_one_table() -> None:
    for name in ("Job, spot", "JobSet", "JobSet, spot workers", "Trainer 2"):
        for code in (*(int(code) for code in ExitCode), KILLED):
            assert PLATFORMS[name]().decision(code) == PLATFORMS["Job"]().decision(code)


@pytest.mark.parametrize("code", [*(int(code) for code in ExitCode), KILLED])
def test_a_drained_node_costs_nothing_and_revives_nothing(code: int) -> None:
    for manifest in sorted(path.stem for path in RENDERED.glob("*.yaml") if "podFailurePolicy" in path.read_text()):
        rules = KubernetesJobs(1, manifest)._rules
        alone, disrupted = (pod_failure_action(rules, code, disrupted=drained) for drained in (False, True))
        if code != 0:
            assert disrupted == ("FailJob" if alone == "FailJob" else "Ignore")


def check(world: World) -> str:
    outcome = world.run()
    assert not outcome.startswith("stuck"), outcome
    if outcome == "done":
        assert world.committed == world.total, "it says that it is done, and the last checkpoint is not there"
    else:
        assert outcome in HUMAN
        if outcome in ("exit code 78", "exit code 79"):
            assert world.faults, "nothing had happened to it"
    return outcome


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_sequence_ends_done_or_where_the_documents_say(platform: str) -> None:
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(PER_PLATFORM):
        world = random_world(PLATFORMS[platform](), random.Random(f"{platform} {seed}"))
        try:
            outcomes[check(world)] += 1
        except AssertionError as error:
            raise AssertionError(f"{platform}, seed {seed}: {error}") from error
        faults.update(world.faults)
    assert outcomes["done"] > PER_PLATFORM / 3, outcomes
    # Each kind of fault has happened.
    assert len(faults) >= 9, faults
    print(f"{platform}: {dict(outcomes)} {dict(faults)}")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("step", range(5))
def test_a_leader_killed_at_any_step_of_its_end(platform: str, step: int) -> None:
    for seed in range(20):
        world = World(PLATFORMS[platform](), random.Random(seed))
        world.kill_leader_at.add(step)
        assert check(world) == "done" and world.faults


ELASTIC = ("JobSet, spot workers", "Slurm, elastic")


@pytest.mark.parametrize("platform", ELASTIC)
@pytest.mark.parametrize("min_nodes", [1, 2])
def test_nodes_that_come_and_go_leave_no_run_behind(platform: str, min_nodes: int) -> None:
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    changes = 0
    for seed in range(PER_PLATFORM // 2):
        source = random.Random(f"elastic {platform} {min_nodes} {seed}")
        world = random_world(PLATFORMS[platform](), source, make=ElasticWorld, min_nodes=min_nodes)
        assert isinstance(world, ElasticWorld)
        try:
            outcomes[check(world)] += 1
        except AssertionError as error:
            raise AssertionError(f"{platform}, seed {seed}: {error}") from error
        faults.update(world.faults)
        changes += world.changes
    assert outcomes["done"] > PER_PLATFORM / 6, outcomes
    assert len(faults) >= 9 and changes > PER_PLATFORM / 2, (faults, changes)


def test_losing_a_node_costs_an_elastic_run_no_wait() -> None:
    """One machine is lost early: the others finish without it, and its replacement learns that they have."""

    def hours(make: Callable[..., World]) -> float:
        world = make(PLATFORMS["JobSet, spot workers"](), random.Random(3), total=6)
        world.plan(700.0, lambda: world.lose(2))
        assert check(world) == "done"
        return world.time / 3600

    assert hours(ElasticWorld) <= hours(World)


def stuck_or_lost(controller: Any, **options: Any) -> int:
    """Of 300 sequences without a bug of the user's, those that do not end well."""
    count = 0
    for seed in range(300):
        world = random_world(controller(), random.Random(f"mutant {seed}"), bugs=False, **options)
        outcome = world.run()
        count += outcome != "done" or world.committed < world.total
    return count


def jobset(**changes: Any) -> KubernetesJobs:
    return KubernetesJobs(2, "several-nodes", **changes)


def test_the_model_finds_an_end_that_is_told_too_early() -> None:
    """The others left for good before the last commit: a new leader waited for them for ever."""
    assert stuck_or_lost(jobset, told_first=True) > stuck_or_lost(jobset)
    world = World(jobset(), random.Random(1), told_first=True)
    world.kill_leader_at.add(1)
    assert world.run() != "done"


def test_the_model_finds_a_limit_that_all_nodes_share() -> None:
    """One fault of the run's was N failures."""

    def shared() -> Controller:
        controller = KubernetesJobs(8, "several-nodes")
        controller._shared = True
        return controller

    def by_node() -> Controller:
        return KubernetesJobs(8, "several-nodes")

    assert stuck_or_lost(shared) > stuck_or_lost(by_node)


def test_the_model_finds_nodes_that_do_not_wait_long_enough() -> None:
    """600 s against a back-off of up to 10 min and the time to start a machine."""

    def hasty() -> Controller:
        controller = jobset()
        controller.timeout_s = 200.0
        return controller

    assert stuck_or_lost(hasty) > stuck_or_lost(jobset)


def test_a_job_of_batch_has_an_end() -> None:
    """The rule submitted it again without a limit; a run whose storage stays away was paid for until someone looked."""
    for platform in ("AWS Batch", "AWS Batch, nodes"):
        controller = PLATFORMS[platform]()
        starts = 1
        while controller.ended(End(0, int(ExitCode.STORAGE_FAILED))).outcome is None:
            starts += 1
            assert starts <= 1000
        assert starts == 100


def test_a_term_that_was_not_handled_is_a_kill() -> None:
    assert PLATFORMS["Job"]().decision(128 + signal.SIGTERM) == "again, counts"
