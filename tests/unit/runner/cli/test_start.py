"""The options of `runner start`; what they lead to is in tests/unit/runner/start."""

from __future__ import annotations

import pytest

from runner.cli.start import resume_step
from runner.errors import UsageError


@pytest.mark.parametrize(("text", "step"), [("auto", "auto"), ("never", "never"), ("0", 0), ("120", 120)])
def test_what_to_resume_from(text: str, step: str | int) -> None:
    assert resume_step(text) == step


@pytest.mark.parametrize("text", ["", "-1", "newest", "1.5", "٣"])
def test_what_is_no_checkpoint_to_resume_from(text: str) -> None:
    with pytest.raises(UsageError, match="use auto, never, or the number"):
        resume_step(text)
