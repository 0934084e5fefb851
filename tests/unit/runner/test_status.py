from __future__ import annotations

import pytest

from runner.status import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (3599.6, "1 h 0 min"),
        (86399.9, "1 d 0 h"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_are_rounded_once(seconds: float, text: str) -> None:
    """119.7 s were 1 min 60 s."""
    assert duration(seconds) == text
