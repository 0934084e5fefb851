"""One cause from the failures of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind


def combine(failures: Sequence[Failure]) -> Failure:
    """Combine the failures of all nodes for one attempt: a cause takes precedence over its effects.

    A lost node makes the ranks of the others hang, and both make ranks lose their connections. Finished and preempted
    count only if all nodes report them.

    Args:
        failures: One per node, in the order of their node ranks.

    Returns:
        The failure that is the cause, with the last step that any node finished.
    """
    step = max(failure.step for failure in failures)
    bad = [failure for failure in failures if not failure.kind.is_orderly]
    if bad:
        chosen = min(bad, key=lambda failure: failure.effect_rank)
    else:
        # Nodes that had finished before the others agreed to stop have nothing left to do.
        chosen = next((failure for failure in failures if failure.kind is FailureKind.PREEMPTED), failures[0])
    return replace(chosen, step=step)
