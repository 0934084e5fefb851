"""Finds a launcher that does not end with its ranks, or starts none."""

from __future__ import annotations

from dataclasses import dataclass

from runner.ranks.watch import RankWatch

# From the last rank's death to torchrun's report of it; longer while torchrun waits for a node that is gone.
_PATIENCE_S = 5.0
# The same if all ranks have ended well: nodes wait for each other.
_END_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Overdue:
    """A launcher whose report is overdue.

    Attributes:
        cause: Why, for people.
        finished: Whether all ranks had finished.
        over: Whether the ranks are gone, so that only the report is missing.
    """

    cause: str
    finished: bool
    over: bool


class LauncherCheck:
    """Measures for how long a report of the launcher is due: torchrun reports once all ranks are gone."""

    def __init__(self, ranks: RankWatch, nproc: int, quiet_timeout_s: float, now: float) -> None:
        """Begin to measure.

        Args:
            ranks: The ranks of the attempt on this node.
            nproc: How many there are.
            quiet_timeout_s: Seconds that the launcher may take until it starts the first rank.
            now: Monotonic seconds.
        """
        self._ranks, self._nproc, self._quiet_timeout_s = ranks, nproc, quiet_timeout_s
        self._quiet_since = now

    def skip(self, seconds: float) -> None:
        """Leave out a time for which this process was stopped."""
        self._quiet_since += seconds

    def look(self, now: float, *, killed: bool) -> Overdue | None:
        """Return whether the report is overdue.

        Args:
            now: Monotonic seconds.
            killed: Whether this runner has killed the ranks.
        """
        ranks, patience_s = self._ranks, self._quiet_timeout_s
        finished = not ranks.pidfds and len(ranks.done) == self._nproc
        over = killed or (not ranks.pidfds and len(ranks.deaths) >= self._nproc)
        if not ranks.pids and not killed:
            # It has yet to start the first rank, or waits for the other nodes.
            cause = f"no rank was started within {patience_s:g} s (restart.quiet_timeout_s); the launcher was killed"
        else:
            cause = "the launcher did not end with its ranks, and was killed"
            patience_s = _PATIENCE_S if killed else _END_PATIENCE_S
            if ranks.pidfds or not over:
                self._quiet_since = now
        return Overdue(cause, finished, over) if now - self._quiet_since > patience_s else None
