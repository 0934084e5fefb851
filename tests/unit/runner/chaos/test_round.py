"""One run under faults: what is injected, what is expected of the run, and when it is over."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from checkpointing.commit.tiers import open_tiers
from runner.chaos.draw import FaultDraw
from runner.chaos.result import Result
from runner.chaos.round import Round
from runner.chaos.scene import Effect, FailpointFile, Fault, JobPace, Moment, NotApplicable, Scene
from runner.journal.events import Entry
from runner.journal.parsing import parse


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


def round_of(run: Any, folder: Path, effect: Effect, inject: Callable[[Scene], str]) -> tuple[Round, Result]:
    (folder / "checkpoints").mkdir()
    tiers = open_tiers(str(folder / "checkpoints"))
    scene = Scene(run, tiers, random.Random(1), FailpointFile(folder / "failpoints"))
    result = Result()
    draw = FaultDraw([Fault("fault", effect, inject, (Moment.STEP,))], random.Random(1), result)
    return Round(1, scene, draw, JobPace(10, 0.01), result, lambda text: None), result


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
