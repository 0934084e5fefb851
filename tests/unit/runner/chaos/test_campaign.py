"""When a campaign ends, what it compares, and what it keeps; with runs that only exist in the test."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import entry

from runner.chaos.campaign import Campaign
from runner.chaos.node_campaign import NodeCampaign
from runner.chaos.run_under_test import JobUnderTest, RunUnderTest
from runner.chaos.scene import CampaignFailed, JobPace, Locations
from runner.chaos.verdict import HALVED_TOLERANCE, NONDETERMINISTIC_TOLERANCE, Injection
from runner.config.schema import Config
from runner.journal.events import Entry

WHOLE_RUN = [
    entry(0.0, "run_started", 0, run_id="r", committed_step=-1),
    entry(1.0, "attempt_started", 1),
    entry(10.0, "training_started", 1, step=0, total_steps=20),
    entry(11.0, "log", 1, step=1, loss=1.0),
    entry(14.0, "log", 1, step=20, loss=1.0),
    entry(14.0, "committed", 1, step=20, nbytes=1, duration_s=0.1),
]


class FaultFreeRun:
    """In place of `RunUnderTest`: a run that has ended."""

    def __init__(self, folder: Path, code: int, entries: list[Entry]) -> None:
        self.folder, self.entries, self._code = folder, entries, code
        self.process = self

    def __enter__(self) -> FaultFreeRun:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> int:
        return self._code

    def refresh(self) -> None:
        pass

    def tail(self, length: int) -> str:
        return "the end of its output"


class Scripted(Campaign):
    """A campaign whose runs do what the test has planned.

    Attributes:
        rounds: For each round, how many faults it injects and whether it passes.
        differing: Folders whose results differ, with the smallest tolerance at which they do not.
        comparisons: Folder and options of each comparison.
        removed: Folders of runs that were removed.
    """

    def __init__(self, folder: Path, *, code: int = 0, entries: list[Entry] | None = None, **options: Any) -> None:
        super().__init__(
            folder, JobUnderTest(), locations=Locations(Config(), "x"), seed=1, report=self._note, **options
        )
        self.lines: list[str] = []
        self._code, self._entries = code, WHOLE_RUN if entries is None else entries
        self.rounds: list[tuple[int, bool]] = []
        self.during_round: Callable[[], None] = lambda: None
        self.differing: dict[str, float] = {}
        self.unseeded = list[str]()
        self.comparisons: list[tuple[str, dict[str, float | None]]] = []
        self.removed: list[str] = []
        locations: Any = self._locations
        locations.remove = lambda folder: self.removed.append(folder.name)

    def _note(self, line: str) -> None:
        self.lines.append(line)

    def _make_run(
        self, folder: Path, environment: dict[str, str], on_start: Callable[[int], None] = lambda pid: None
    ) -> RunUnderTest:
        run: Any = FaultFreeRun(folder, self._code, self._entries)
        return run  # type: ignore[no-any-return]

    def _run_round(self, folder: Path, pace: JobPace, is_enough: Callable[[], bool]) -> bool:
        self.result.runs += 1
        self.during_round()
        num_faults, passes = self.rounds.pop(0)
        self.result.injections += [Injection("f", "step", self.result.runs, 1, "done") for _ in range(num_faults)]
        return passes

    def differences(self, folder: Path, *flags: str, **options: float | None) -> list[str]:
        self.comparisons.append((folder.name, options))
        needed = self.differing.get(folder.name, 0.0)
        found = ["weight differs"] if (options.get("tolerance") or 0.0) < needed else []
        return [*found, *self.unseeded]


@pytest.fixture(autouse=True)
def no_subreaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.chaos.campaign.processes.become_subreaper", lambda: None)


def test_it_ends_once_enough_faults_were_injected(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    campaign.rounds = [(3, True), (1, True), (2, True), (9, True)]
    result = campaign.run(5)
    assert len(result.injections) == 6 and result.runs == 3 and result.steps == 20 and result.total_s > 0


def test_a_duration_is_a_minimum_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("runner.chaos.campaign.time.monotonic", lambda: now)

    def train() -> None:
        nonlocal now
        now += 30.0

    campaign = Scripted(tmp_path)
    campaign.during_round, campaign.rounds = train, [(5, True)] * 4
    assert campaign.run(5, seconds=70.0).runs == 3


def test_rounds_without_a_fault_end_it_only_in_a_row(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    campaign.rounds = [(0, True), (0, True), (1, True), (0, True), (0, True), (0, True), (1, True)]
    assert campaign.run(5).runs == 6


@pytest.mark.parametrize(("keep", "removed"), [(False, ["run-1", "run-3"]), (True, [])])
def test_folders_of_runs_that_failed_are_kept(keep: bool, removed: list[str], tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    campaign.rounds = [(1, True), (1, False), (1, True)]
    campaign.run(3, keep=keep)
    assert campaign.removed == removed


def test_the_pace_of_the_fault_free_run(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    pace = campaign.run_reference()
    assert pace.steps == 20 and pace.step_s == pytest.approx(4.0 / 20)


def test_a_job_that_fails_without_faults_is_no_subject(tmp_path: Path) -> None:
    with pytest.raises(CampaignFailed, match=r"exits with 78 without any fault.*\nthe end of its output"):
        Scripted(tmp_path, code=78).run(5)


@pytest.mark.parametrize("said", [{}, {"total_steps": 500}])
def test_what_a_program_says_of_its_length_does_not_count(said: dict[str, int], tmp_path: Path) -> None:
    entries = [*WHOLE_RUN[:2], entry(10.0, "training_started", 1, step=0, **said), *WHOLE_RUN[3:]]
    assert Scripted(tmp_path, entries=entries).run_reference().steps == 20


def test_a_job_that_commits_nothing_is_no_subject(tmp_path: Path) -> None:
    with pytest.raises(CampaignFailed, match=r"committed no checkpoint.*needs trainer\.save_steps below"):
        Scripted(tmp_path, entries=WHOLE_RUN[:-1]).run(5)


def compare(campaign: Scripted, *, is_halved: bool = False) -> list[str]:
    return campaign.compare(campaign._folder / "run-1", is_halved=is_halved)


def test_results_are_compared_bit_for_bit(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    assert compare(campaign) == [] and campaign.comparisons == [("run-1", {"tolerance": None})]


def test_a_run_that_differs_fails_where_fault_free_runs_are_identical(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    campaign.differing = {"run-1": 1e-6}
    for _ in range(2):
        assert compare(campaign) == ["weight differs"]
    assert not campaign.result.nondeterministic
    # The second fault-free run is made once.
    assert [name for name, _ in campaign.comparisons] == ["run-1", "reference-again", "run-1"]


def test_a_job_that_is_nondeterministic_by_itself_is_compared_within_a_tolerance(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    campaign.differing = {"run-1": 1e-6, "reference-again": 1e-6}
    assert compare(campaign) == [] and campaign.result.nondeterministic
    assert any("--deterministic for a configured job" in line for line in campaign.lines)
    campaign.comparisons.clear()
    assert compare(campaign) == []
    assert campaign.comparisons == [("run-1", {"tolerance": NONDETERMINISTIC_TOLERANCE})]
    campaign.differing["run-1"] = 1.0
    assert compare(campaign) == ["weight differs"]


def test_generators_that_nobody_seeds_are_left_out_and_everything_else_is_compared(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    campaign.unseeded = ["rng_state_0.pth: the generators' states differ", "data_state_0.pth: 0.start: 1 and 2"]
    assert compare(campaign) == [] and not campaign.result.nondeterministic
    assert any("nobody seeds: data_state_0.pth, rng_state_0.pth" in line for line in campaign.lines)
    campaign.differing = {"run-1": 1e-6}
    assert compare(campaign) == ["weight differs"]
    # What is more than in two fault-free runs is a difference of the run.
    campaign.unseeded.append("rng_state_1.pth: the generators' states differ")
    assert compare(campaign) == ["weight differs", campaign.unseeded[-1]]


def test_a_tolerance_of_the_user_is_the_only_one(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path, tolerance=0.01)
    campaign.differing = {"run-1": 0.1, "reference-again": 0.1}
    assert compare(campaign) == ["weight differs"]
    assert campaign.comparisons == [("run-1", {"tolerance": 0.01})]


def test_a_halved_micro_batch_is_judged_by_the_losses(tmp_path: Path) -> None:
    campaign = Scripted(tmp_path)
    compare(campaign, is_halved=True)
    assert campaign.comparisons == [("run-1", {"losses": HALVED_TOLERANCE})]


def test_neither_budget_nor_backoff_ends_a_run(tmp_path: Path) -> None:
    options = Campaign(tmp_path, JobUnderTest(["--debug"]), locations=Locations(Config(), "x"), seed=1)._job.options
    assert options[0] == "--debug" and options[1::2] == ("--set",) * 3
    assert options[2] == "restart.max_restarts=1000000"


def test_a_seed_draws_the_same_again(tmp_path: Path) -> None:
    draws = [Scripted(tmp_path)._random.random() for _ in range(2)]
    assert draws == [random.Random(1).random()] * 2


@pytest.mark.parametrize("alone", [True, False])
def test_a_run_beside_other_processes_does_not_end_them(alone: bool, tmp_path: Path) -> None:
    """A second fault-free run of a campaign of nodes ended their network with it: node 1 never met node 0."""
    locations = Locations(Config(), "x")
    run = Campaign(tmp_path, JobUnderTest(), locations=locations, seed=1, alone=alone)._make_run(tmp_path / "run", {})
    with contextlib.closing(run):
        assert run._alone is alone
    nodes = NodeCampaign(tmp_path, JobUnderTest(), locations=locations, num_nodes=2, seed=1)
    assert not nodes._calm._alone
