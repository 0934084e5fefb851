"""What the agent's threads report to its main thread.

A result is an event for the run's monitors, or one of the notices below, which concern the agent alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from checkpointing.agent.arenas import Arena
from checkpointing.agent.events import Event, StepEvent
from checkpointing.commit.training_stage import TrainingStage


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
