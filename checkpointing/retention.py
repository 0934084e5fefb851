"""Which checkpoints to remove. Pure: steps in, steps out."""

from __future__ import annotations

from collections.abc import Iterable


def steps_to_remove(committed_steps: Iterable[int], keep_last: int | None) -> list[int]:
    """Oldest first, all but the newest `keep_last`. `None` keeps all; the newest one is never removed.

    Only steps of committed checkpoints may be passed: what is torn must not count towards what is kept.
    """
    if keep_last is None:
        return []
    ordered = sorted(set(committed_steps))
    return ordered[: -max(keep_last, 1)]
