"""Why an attempt ended, as one value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from runner.recovery.kinds import FailureKind, is_own_fault

# First and last step.
Window = tuple[int, int]

# A rank's own fault, also where NCCL's watchdog reports it: "Process group watchdog thread terminated with
# exception: CUDA error: an illegal memory access was encountered".
_OF_OWN_DEVICE = re.compile(r"CUDA error: |HIP error: ")

# What a rank raises when another rank has gone: an effect, never the cause.
_CASCADE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket closed|\bgloo\b|\bnccl|ProcessGroup(Gloo|NCCL)"
    r"|DistNetworkError|DistStoreError|DistBackendError|AgentUnavailable",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended."""

    kind: FailureKind  # The class of the failure.
    cause: str  # Why, for people.
    rank: int | None = None  # Global rank that failed first; None if it was none.
    step: int = 0  # Last finished step of the attempt.
    # Equal for equal failures at the same step; empty for what says nothing about the next attempt.
    signature: str = ""
    window: Window | None = None  # First and last step to skip should it happen again; None where that would not help.
    # The next attempt may not meet it although its class usually does: memory that was short before a step had
    # ended, a GPU that another process still held. Worth one retry, unchanged.
    may_pass: bool = False
    in_fork: bool = False  # An accelerator cannot be used in a forked process: ranks have to be fresh interpreters.

    @property
    def effect_rank(self) -> int:
        """How far this is from a cause: 0 for a cause, more for what a failure elsewhere may have led to."""
        if self.kind is FailureKind.CRASHED and not is_effect(self.cause):
            return 0
        return self.kind.rule.effect_rank

    def at_step(self, step: int) -> Failure:
        """Return the same failure with the attempt's last finished step."""
        return replace(self, step=step)

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as a JSON object."""
        fields = asdict(self)
        # The name that it has in runs of earlier releases.
        fields["fingerprint"] = fields.pop("signature")
        return {**fields, "kind": self.kind.value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Failure:
        """Parse what `to_dict` returned.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: It is something else.
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
    """Parse a pair of steps.

    Raises:
        ValueError, TypeError: It is something else.
    """
    first, last = value
    if type(first) is not int or type(last) is not int or not 0 < first <= last < 2**53:
        raise ValueError(f"not a window of steps: {value!r}")
    return first, last


def is_effect(error: str) -> bool:
    """Return whether an error is what a rank raises when another rank has gone."""
    is_own = is_own_fault(error) or _OF_OWN_DEVICE.search(error)
    return not is_own and bool(_CASCADE.search(error))


def combine(failures: Sequence[Failure]) -> Failure:
    """Combine the failures of all nodes for one attempt: a cause takes precedence over its effects.

    A lost node makes the ranks of the others hang, and both make ranks lose their connections. Finished and preempted
    count only if all nodes report them. The failures are in the order of the node ranks; the cause is returned with the
    last step that any node finished.
    """
    step = max(failure.step for failure in failures)
    bad = [failure for failure in failures if not failure.kind.is_orderly]
    if bad:
        chosen = min(bad, key=lambda failure: failure.effect_rank)
    else:
        # Nodes that had finished before the others agreed to stop have nothing left to do.
        chosen = next((failure for failure in failures if failure.kind is FailureKind.PREEMPTED), failures[0])
    return replace(chosen, step=step)
