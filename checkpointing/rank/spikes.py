"""Losses that stand out from those before them, and steps whose samples are passed over for it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

_NUM_LOSSES = 64
_MIN_LOSSES = 16
# Makes the median absolute deviation of a normal distribution its standard deviation.
_NORMAL = 1.4826
# Of the median: where losses hardly differ at all, that is no spike yet.
_LEAST_SHARE = 0.05


class SpikeDetector:
    """By the modified z-score: the distance from the median in median absolute deviations (Iglewicz and Hoaglin, "How
    to Detect and Handle Outliers", 1993)."""

    def __init__(self, zscore: float, losses: Iterable[float] = ()) -> None:
        """
        Args:
            zscore: above which a loss is a spike.
            losses: of the steps so far, the newest last.
        """
        self._zscore = zscore
        self.losses = deque(losses, maxlen=_NUM_LOSSES)

    def look(self, loss: float) -> str | None:
        """Why the loss of a step is a spike; None where it is not, and it counts for those that come."""
        if len(self.losses) >= _MIN_LOSSES:
            median = statistics.median(self.losses)
            deviation = _NORMAL * statistics.median(abs(other - median) for other in self.losses)
            deviation = max(deviation, _LEAST_SHARE * abs(median))
            if not loss - median <= self._zscore * deviation:
                score = (loss - median) / deviation if deviation else float("inf")
                return (
                    f"{loss:.4g}, {score:.1f} deviations above the median {median:.4g} of the last {len(self.losses)}"
                )
        self.losses.append(loss)
        return None


class SkippedSteps:
    """Windows of steps whose samples are skipped.

    Args:
        windows: First and last step of each window.
    """

    def __init__(self, windows: Iterable[tuple[int, int]] = ()) -> None:
        self._windows = [range(first, last + 1) for first, last in windows]

    def __contains__(self, step: int) -> bool:
        return any(step in window for window in self._windows)
