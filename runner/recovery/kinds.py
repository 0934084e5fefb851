"""The classes of failures, and a failure as the policy sees it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any


class FailureKind(Enum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    ENDED = "ended at once"  # by a stop request that left no time, or nothing, to save
    CRASHED = "crashed"  # a signal, a lost peer, an error in mid-training
    OUT_OF_MEMORY = "out of memory"  # of the GPU, of the process, or of its cgroup
    NON_FINITE = "non-finite gradients"  # the second time at the same step: its data, or the learning rate
    SPIKE = "loss spike"  # likewise
    HUNG = "hung"  # no sign of life within the deadline of its phase
    NETWORK = "network failure"  # a server or the network did not answer a rank; may have passed by the next attempt
    BOOT = "boot failure"  # a Python error before the first step: it would come again
    NO_VALID_CHECKPOINT = "no valid checkpoint"
    FENCED = "fenced"  # a newer attempt of this run has begun elsewhere
    STORAGE_FAILED = (
        "storage failed"  # too many saves in a row, training ended in good order; or a rank met a full disk
    )
    AGENT_LOST = "checkpoint agent lost"
    LAUNCHER_LOST = "launcher lost"
    NODE_LOST = "node lost"  # another machine is silent or gone
    RUNNER_LOST = "runner lost"  # an earlier `runner start` ended without a word
    BAD_NODE = "bad node"  # this machine's hardware or driver is at fault


# A machine that was told to end, or that ended because another one was silent.
_EFFECTS = {FailureKind.ENDED, FailureKind.NODE_LOST}
# First and last step.
Window = tuple[int, int]


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended.

    Attributes:
        step: last finished step of the attempt.
        fingerprint: equal for equal failures at the same step; empty for what says nothing about the next attempt.
        window: first and last step to be passed over should it come again; None where that would not help.
        may_pass: what has failed may be as it should be a moment later, though it is not the kind that is: memory that
            was short before a step had ended, a GPU that another process still held. Worth one more try, unchanged.
        in_fork: an accelerator cannot be used in a process that was forked: ranks are to be fresh interpreters.
    """

    kind: FailureKind
    cause: str
    rank: int | None = None
    step: int = 0
    fingerprint: str = ""
    window: Window | None = None
    may_pass: bool = False
    in_fork: bool = False

    @property
    def is_effect(self) -> bool:
        """It may be what a failure elsewhere has led to."""
        return self.kind in _EFFECTS or (self.kind is FailureKind.CRASHED and is_effect(self.cause))

    def at_step(self, step: int) -> Failure:
        """The same, with the attempt's last finished step."""
        return replace(self, step=step)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Failure:
        """
        Raises:
            ValueError, KeyError, TypeError, OverflowError: `to_dict` did not make it.
        """
        rank, cause = fields["rank"], str(fields["cause"])
        cause.encode()  # it will be printed
        return cls(
            FailureKind(fields["kind"]),
            cause,
            int(rank) if rank is not None else None,
            int(fields["step"]),
            str(fields["fingerprint"]),
            read_window(fields["window"]) if fields.get("window") is not None else None,
            fields.get("may_pass") is True,
            fields.get("in_fork") is True,
        )


def read_window(value: Any) -> Window:
    """Two steps.

    Raises:
        ValueError, TypeError: they are none.
    """
    first, last = value
    if type(first) is not int or type(last) is not int or not 0 < first <= last < 2**53:
        raise ValueError(f"no window of steps: {value!r}")
    return first, last


# A rank's own, also where NCCL's watchdog reports it: "Process group watchdog thread terminated with
# exception: CUDA error: an illegal memory access was encountered".
_OF_OWN_DEVICE = re.compile(r"CUDA error: |HIP error: ")

# What a rank raises when another rank has gone: an effect, never the cause.
_CASCADE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket closed|gloo|nccl|DistNetworkError|DistStoreError"
    r"|DistBackendError|AgentUnavailable",
    re.IGNORECASE,
)


def is_effect(error: str) -> bool:
    """Whether a rank's error is what it says when another rank has gone."""
    return bool(_CASCADE.search(error)) and not _OF_OWN_DEVICE.search(error)
