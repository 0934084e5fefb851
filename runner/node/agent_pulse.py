"""Measures how long an agent has not answered, or has made no progress. Pure: no process, no clock."""

from __future__ import annotations

# The agent answers at once, except while it allocates much memory.
_PING_INTERVAL_S = 2.0
_PONG_TIMEOUT_S = 120.0
# Seconds without progress of the agent. Storage that takes longer for a part of a commit hangs.
_PROGRESS_TIMEOUT_S = 600.0
# Seconds between two turns after which this process was itself stopped, and must not blame others for their silence.
_GAP_S = 3.0


class AgentPulse:
    """Keeps when an agent was pinged, when it answered, and when it made progress, in monotonic seconds."""

    def __init__(self, quiet_timeout_s: float, now: float) -> None:
        """Begin to measure.

        Args:
            quiet_timeout_s: Seconds without an answer after which the agent is silent (120 at most).
            now: Monotonic seconds.
        """
        self._timeout_s = min(_PONG_TIMEOUT_S, quiet_timeout_s)
        self._pinged_at = self._answered_at = self._progressed_at = self._turned_at = now

    def restart(self, now: float) -> None:
        """Restart the time to answer: no ping was sent for a while."""
        self._turned_at = self._answered_at = now

    def turn(self, now: float) -> float:
        """Begin a turn of the loop.

        Args:
            now: Monotonic seconds.

        Returns:
            Seconds for which this process was stopped since the last turn; they count against no other process.
        """
        gap, self._turned_at = now - self._turned_at, now
        gap = gap if gap > _GAP_S else 0.0
        self._answered_at += gap
        return gap

    def ping_due(self, now: float) -> bool:
        """Return whether to send a ping now, which is every 2 s."""
        if now - self._pinged_at < _PING_INTERVAL_S:
            return False
        self._pinged_at = now
        return True

    def answered(self, now: float) -> None:
        """Note an answer to a ping."""
        self._answered_at = now

    def progressed(self, now: float) -> None:
        """Note progress."""
        self._progressed_at = now

    def is_silent(self, now: float) -> bool:
        """Return whether an answer is overdue."""
        return now - self._answered_at > self._timeout_s

    @property
    def give_up_at(self) -> float:
        """When an agent that makes no progress until then is given up."""
        return self._progressed_at + _PROGRESS_TIMEOUT_S
