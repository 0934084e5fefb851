"""What the agent's threads report: results for its main thread, and events for monitors."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from checkpointing.agent.arenas import Arena
from checkpointing.agent.events import Event, StepEvent, StorageRetried, Transfer
from checkpointing.commit.tiers import TrainingStage
from checkpointing.errors import CheckpointError

_PROGRESS_INTERVAL_S = 0.5
_RETRIES_INTERVAL_S = 60.0

Clock = Callable[[], float]


class RetryCounter:
    """Retried calls to one tier: reported at once, then once per minute, and when a task is over. Thread-safe."""

    def __init__(self, tier: str, report: Report, clock: Clock = time.monotonic) -> None:
        self._tier, self._report, self._clock = tier, report, clock
        self._lock = threading.Lock()
        self._count, self._reason, self._reported_at = 0, "", -_RETRIES_INTERVAL_S

    def add(self, reason: str) -> None:
        """Count a retried call."""
        with self._lock:
            self._count, self._reason = self._count + 1, reason
        if self._clock() - self._reported_at >= _RETRIES_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Report the calls that have not been reported yet."""
        with self._lock:
            if not self._count:
                return
            event = StorageRetried(tier=self._tier, count=self._count, reason=self._reason)
            self._count, self._reported_at = 0, self._clock()
        self._report(event, None)


def progress_reporter(
    what: str, step: int, total: int, report: Report, clock: Clock = time.monotonic
) -> Callable[[int], None]:
    """Return a function that counts transferred bytes and reports their sum twice per second.

    Args:
        what: `upload` or `download`.
        step: Step of the checkpoint.
        total: Bytes to transfer.
        report: Takes the events.
        clock: Seconds.

    Returns:
        The function; any thread may call it.
    """
    done, reported_at, lock = 0, clock(), threading.Lock()

    def transferred(nbytes: int) -> None:
        nonlocal done, reported_at
        with lock:
            done, now = done + nbytes, clock()
            due = now - reported_at >= _PROGRESS_INTERVAL_S
            reported_at = now if due else reported_at
            event = Transfer(step=step, what=what, done=done, total=total)
        if due:
            report(event, None)

    return transferred


def text_of(error: Exception) -> str:
    """Return what a user reads of an error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Digested:
    """All files of a snapshot have their digests."""


@dataclass(frozen=True)
class FenceAnswered:
    """An attempt's fence is in place, or could not be put there."""


@dataclass(frozen=True)
class UploadEnded:
    """A task of the uploader is over."""


@dataclass(frozen=True)
class SharesWritten:
    """This node has written its shards of a checkpoint that another node commits."""


@dataclass(frozen=True)
class PortionEnded:
    """This node has written its parts of a checkpoint that another node commits, or could not."""


Result = Event | Digested | FenceAnswered | UploadEnded | SharesWritten | PortionEnded
# Called from any thread; the arena is the one that the thread has finished with, if any.
Report = Callable[[Result, Arena | None], None]

R = TypeVar("R")


def stamped(result: R, stage: TrainingStage) -> R:
    """Return a result with the stage that it belongs to, if it concerns a step.

    The run's first stage has no name, and its steps are those of the run: nothing is added.
    """
    if not stage.name or not isinstance(result, StepEvent):
        return result
    return dataclasses.replace(result, stage=stage.name, run_step=result.step + stage.steps_before)


def stamped_announcement(announced: dict[str, Any], stage: TrainingStage) -> dict[str, Any]:
    """Return what a rank announced with the stage that it belongs to; its contents mean nothing to the agent."""
    if not stage.name:
        return announced
    added: dict[str, Any] = {"stage": stage.name}
    if "step" in announced:
        added["run_step"] = announced["step"] + stage.steps_before
    return {**announced, **added}
