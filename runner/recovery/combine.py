"""One cause from the failures of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.recovery.kinds import Failure, FailureKind


def _distance_from_cause(failure: Failure) -> int:
    """A lost machine makes the others' ranks hang; both make ranks lose their connections."""
    later = [FailureKind.NODE_LOST, FailureKind.HUNG, FailureKind.CRASHED, FailureKind.ENDED]
    is_cause = not failure.is_effect and failure.kind is not FailureKind.HUNG
    return 0 if is_cause else 1 + later.index(failure.kind)


def combine(failures: Sequence[Failure]) -> Failure:
    """One failure of several machines' for one attempt, the first machine's first: a cause goes before its effects.

    Finished and preempted count only if all machines say so.
    """
    step = max(failure.step for failure in failures)
    good = (FailureKind.FINISHED, FailureKind.PREEMPTED)
    bad = [failure for failure in failures if failure.kind not in good]
    if not bad:
        # Those that had finished before the others agreed to stop have nothing left to do.
        chosen = next((failure for failure in failures if failure.kind is FailureKind.PREEMPTED), failures[0])
    else:
        chosen = min(bad, key=_distance_from_cause)
    return replace(chosen, step=step)
