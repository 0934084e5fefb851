"""Aim is used as if a rank could be killed at any moment, and a machine be slow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from infra.parts import require
from transformers import TrainerControl, TrainerState

from runner.training.tracking import AimTracker

OPEN = """
import os, signal, sys
from aim.sdk.repo import DB
from runner.training.tracking import AimTracker
if sys.argv[2] == "killed":
    DB.run_upgrades = lambda self: os.kill(os.getpid(), signal.SIGKILL)
run = AimTracker(sys.argv[1], "e", "somewhere")._open()
run.track(1.0, name="loss", step=1)
run.close()
"""


@pytest.mark.process
def test_a_rank_killed_while_it_makes_the_repository(tmp_path: Path) -> None:
    """It was half made for ever: every later attempt said that it cannot be used."""
    require("Aim")
    repo = tmp_path / "aim"

    def opened(how: str) -> int:
        command = [sys.executable, "-c", OPEN, str(repo), how]
        return subprocess.run(command, timeout=300).returncode

    assert opened("killed") == -signal.SIGKILL and not (repo / ".aim").exists()
    assert opened("well") == 0 and (repo / ".aim" / "VERSION").exists()
    assert opened("well") == 0
    assert [path.name for path in repo.iterdir()] == [".aim"], "nothing of the first one is left"


LOCKED = """
import sys
from pathlib import Path
from runner.training.tracking import AimTracker
tracker = AimTracker(sys.argv[1], "e", "somewhere")
tracker._make_repository()
(Path(sys.argv[1]) / ".aim" / "locks" / f"{tracker._hash}.softlock").write_text(sys.argv[2])
run = tracker._open()
run.track(1.0, name="loss", step=1)
run.close()
"""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", marks=pytest.mark.soak, id="empty"),
        pytest.param("4242\nvm-17\n99\n", marks=pytest.mark.process, id="of the lock's library only"),
    ],
)
def test_a_rank_killed_as_it_takes_the_lock_of_a_new_run(content: str, tmp_path: Path) -> None:
    """Aim cannot parse such a lock: it refused this run for good, and its repository stayed empty."""
    require("Aim")
    done = subprocess.run([sys.executable, "-c", LOCKED, str(tmp_path / "aim"), content], timeout=300)
    assert done.returncode == 0


class SlowRun:
    """Stands for a run of Aim."""

    def __init__(self, write_s: float) -> None:
        self.write_s = write_s
        self.steps: list[int] = []

    def set(self, *args: Any, **kwargs: Any) -> None: ...

    def log_info(self, *args: Any) -> None: ...

    def close(self) -> None: ...

    def track(self, value: float, *, step: int, **kwargs: Any) -> None:
        time.sleep(self.write_s)
        self.steps.append(step)


class SlowTracker(AimTracker):
    """A tracker whose import of Aim, opening and writing take so long."""

    def __init__(self, import_s: float = 0, open_s: float = 0, write_s: float = 0) -> None:
        super().__init__("somewhere", "e", "checkpoints")
        self.import_s, self.open_s, self.run = import_s, open_s, SlowRun(write_s)

    def _import(self) -> None:
        time.sleep(self.import_s)
        self._imported.set()

    def _open(self) -> SlowRun:
        time.sleep(self.open_s)
        return self.run


def train(tracker: SlowTracker, num_steps: int = 3) -> None:
    args: Any = SimpleNamespace(to_sanitized_dict=dict)
    state, control = TrainerState(), TrainerControl()
    tracker.on_train_begin(args, state, control)
    for step in range(1, num_steps + 1):
        state.global_step = step
        tracker.on_log(args, state, control, {"loss": 1.0})


@pytest.fixture(autouse=True)
def aim_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: object()))
    monkeypatch.setattr("runner.training.tracking.importlib", found)


def test_the_end_waits_for_the_import_of_aim(caplog: pytest.LogCaptureFixture) -> None:
    """A short attempt on a busy machine was over before Aim was there; when all were, the run had no curve."""
    tracker = SlowTracker(import_s=0.3)
    train(tracker)
    tracker.close(patience_s=0.1)
    assert tracker.run.steps == [1, 2, 3] and not caplog.text


def test_the_end_waits_while_points_are_written(caplog: pytest.LogCaptureFixture) -> None:
    tracker = SlowTracker(write_s=0.05)
    train(tracker, 10)
    tracker.close(patience_s=0.2)
    assert tracker.run.steps == [*range(1, 11)] and not caplog.text


@pytest.mark.parametrize(
    ("slow", "patience_s", "limit_s"),
    [({"open_s": 30.0}, 0.1, 60), ({"import_s": 30.0}, 0.1, 0.2), ({"write_s": 0.3}, 60, 0.3)],
    ids=["repository that does not answer", "import over the limit", "points over the limit"],
)
def test_the_end_does_not_wait_for_ever(
    slow: dict[str, float], patience_s: float, limit_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = SlowTracker(**slow)
    train(tracker, 100)
    began = time.monotonic()
    tracker.close(patience_s, limit_s)
    assert time.monotonic() - began < 15
    assert "did not accept all points before training ended" in caplog.text
