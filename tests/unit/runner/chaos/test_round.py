"""One run under faults: what is injected, what is expected of the run, and when it is over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from checkpointing.commit.tiers import open_tiers
from runner.chaos.recovery import RunOver
from runner.chaos.round import Round, draw_fault
from runner.chaos.scene import (
    TRAINING,
    CampaignFailed,
    Effect,
    FailpointFile,
    Fault,
    JobPace,
    Moment,
    NotApplicable,
    Scene,
)
from runner.chaos.verdict import Injection, Result
from runner.journal.events import Entry, parse
from runner.recovery.kinds import FailureKind


def entry(name: str, attempt: int = 1, **rest: Any) -> Entry:
    found = parse({"time": 1.0, "event": name, "attempt": attempt, **rest})
    assert found is not None and found.event.name == name, found
    return found


STARTED = entry("run_started", 0, pid=7)
STEP = entry("log", step=1, loss=1.0)


class Run:
    """A run that trains for ever, unless a fault changes its journal or its exit code."""

    pid = 7

    def __init__(self, folder: Path) -> None:
        self.entries, self.code, self.process = [STARTED, STEP], None, self
        self.temporary = folder / "tmp"
        self.temporary.mkdir()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def poll(self) -> int | None:
        return self.code

    def refresh(self) -> None:
        pass

    def wait(self, find: Callable[[], Any], timeout_s: Any) -> Any:
        return find()

    def shared_memory(self) -> set[Path]:
        return set()

    def leftovers(self, settle_s: float = 0.0) -> list[str]:
        return []

    def tail(self, length: int = 300) -> str:
        return "the end"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return Run(tmp_path)


def round_of(
    run: Any, folder: Path, effect: Effect, inject: Callable[[Scene], str], **options: bool
) -> tuple[Round, Result]:
    (folder / "checkpoints").mkdir()
    tiers = open_tiers(str(folder / "checkpoints"))
    scene = Scene(run, tiers, random.Random(1), FailpointFile(folder / "failpoints"))
    result = Result()
    faults = [Fault("fault", effect, inject, (Moment.STEP,), **options)]
    return Round(1, scene, faults, JobPace(10, 0.01), result, lambda text: None), result


def test_a_fault_that_the_run_survives_is_recorded(run: Any, tmp_path: Path) -> None:
    def inject(scene: Scene) -> str:
        run.entries.append(entry("log", step=2, loss=1.0))
        return "done"

    current, result = round_of(run, tmp_path, Effect.NOTHING, inject)
    current.run(lambda: len(result.injections) == 2)
    assert [(one.step, one.what, one.violations) for one in result.injections] == [(1, "done", []), (2, "done", [])]
    assert all(one.recovered_s is None for one in result.injections), "nothing ended, so nothing was recovered"


def test_an_attempt_that_ends_must_be_restarted_and_make_a_step(run: Any, tmp_path: Path) -> None:
    def inject(scene: Scene) -> str:
        run.entries += [entry("backoff", delay_s=0.1), entry("training_started", 2, step=0)]
        run.entries.append(entry("log", 2, step=1, loss=1.0))
        return "done"

    current, result = round_of(run, tmp_path, Effect.ATTEMPT, inject)
    current.run(lambda: len(result.injections) == 1)
    (one,) = result.injections
    assert one.violations == [] and one.recovered_s is not None
    assert not [text for text in current.violations if "restarts" in text], "the restart was accounted for"


def test_a_fault_that_the_run_does_not_notice_is_a_violation_and_ends_the_round(run: Any, tmp_path: Path) -> None:
    current, result = round_of(run, tmp_path, Effect.ATTEMPT, lambda scene: "done")
    assert not current.run(lambda: False)
    (one,) = result.injections
    assert ["did not notice" in one.violations[0], "no recovery" in one.violations[1]] == [True, True]
    assert any("the faults account for 1" in text for text in current.violations)


def test_a_fault_that_does_not_apply_is_skipped(run: Any, tmp_path: Path) -> None:
    def inject(scene: Scene) -> str:
        run.code = 0
        raise NotApplicable("no rank is running")

    current, result = round_of(run, tmp_path, Effect.ATTEMPT, inject)
    current.run(lambda: False)
    assert result.injections == [] and result.skipped == {"fault": (1, "no rank is running")}


def test_a_moment_never_comes_once_the_run_is_over(run: Any, tmp_path: Path) -> None:
    run.code = 0
    current, result = round_of(run, tmp_path, Effect.ATTEMPT, lambda scene: "done")
    with pytest.raises(RunOver):
        current._wait_for(Moment.RESTORE)
    current.run(lambda: False)
    assert result.injections == []


def fault(name: str, **options: bool) -> Fault:
    return Fault(name, Effect.ATTEMPT, lambda scene: "done", TRAINING, **options)


def test_all_kinds_are_drawn_equally_often(tmp_path: Path) -> None:
    result, tiers = Result(), open_tiers(str(tmp_path))
    faults, source = [fault("a"), fault("b"), fault("c")], random.Random(1)
    for number in range(9):
        drawn, moment = draw_fault(faults, tiers, result, source, may_halve=True)
        assert moment in TRAINING
        # A skipped fault counts as a try, or one that never applies would be drawn forever.
        if number % 2:
            result.skip(drawn.name, "not now")
        else:
            result.injections.append(Injection(drawn.name, moment.value, 1, 1, "done"))
    tries = Counter(injection.fault for injection in result.injections)
    tries.update({name: number for name, (number, _) in result.skipped.items()})
    assert tries == {"a": 3, "b": 3, "c": 3}


def test_halving_faults_only_where_they_are_allowed(tmp_path: Path) -> None:
    tiers, faults, source = open_tiers(str(tmp_path)), [fault("oom", halves=True), fault("kill")], random.Random(1)
    drawn = {draw_fault(faults, tiers, Result(), source, may_halve=False)[0].name for _ in range(20)}
    assert drawn == {"kill"}


@pytest.mark.parametrize(("code", "num_faults"), [(None, 1), (0, 0)])
def test_where_all_faults_halve_a_run_has_one(code: int | None, num_faults: int, run: Any, tmp_path: Path) -> None:
    def inject(scene: Scene) -> str:
        ended = {"cause": "x", "step": 1, "start_step": 0, "kind": FailureKind.OUT_OF_MEMORY.value}
        run.entries += [entry("attempt_ended", **ended), entry("log", step=2, loss=1.0)]
        return "done"

    run.code = code
    current, result = round_of(run, tmp_path, Effect.NOTHING, inject, halves=True)
    current.run(lambda: False)
    assert len(result.injections) == num_faults and current.is_halved == bool(num_faults)


def test_a_fault_that_does_not_apply_to_the_storage_is_refused(tmp_path: Path) -> None:
    faults = [fault("killed at remote.part")]
    with pytest.raises(CampaignFailed, match="--list"):
        draw_fault(faults, open_tiers(str(tmp_path)), Result(), random.Random(1), may_halve=True)
