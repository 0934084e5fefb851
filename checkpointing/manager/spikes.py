"""Detects losses that stand out from those before them; names the steps whose samples are skipped for it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

_NUM_LOSSES = 64
_MIN_LOSSES = 16
# Factor from the median absolute deviation of a normal distribution to its standard deviation.
_NORMAL = 1.4826
# The smallest deviation, as a share of the median: where losses hardly differ, a small change is not a spike.
_LEAST_SHARE = 0.05


class SpikeDetector:
    """Detects spikes by the modified z-score: the distance from the median, in median absolute deviations.

    See Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993.

    Args:
        zscore: Score above which a loss is a spike.
        losses: Losses of the steps so far, the newest last.

    Attributes:
        losses: The losses that the next one is compared with.
    """

    def __init__(self, zscore: float, losses: Iterable[float] = ()) -> None:
        self._zscore = zscore
        self.losses = deque(losses, maxlen=_NUM_LOSSES)

    def look(self, loss: float) -> str | None:
        """Return why the loss of a step is a spike; None where it is not, and later losses are compared with it."""
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
