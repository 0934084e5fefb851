"""What a manager accepts by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from checkpointing.commit.retention import Retention
from checkpointing.manager.manager import CheckpointManager


def test_retention_options_reach_the_agent_by_name(tmp_path: Path) -> None:
    """What is added to `Retention` needs no option of the manager's own."""
    manager = CheckpointManager(
        str(tmp_path), keep_last=3, keep_every=50, best_metric="eval_loss", greater_is_better=True
    )
    assert manager.retention == Retention(3, keep_every=50, best_metric="eval_loss", greater_is_better=True)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    misspelt: dict[str, Any] = {"keep_lats": 3}
    with pytest.raises(TypeError, match="keep_lats"):
        CheckpointManager(str(tmp_path), **misspelt)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"virtual_rank": 4}, r"CheckpointManager\(\) has no option 'virtual_rank'; did you mean 'virtual_ranks'\?"),
        ({"keep_lst": 4}, "has no option 'keep_lst'; did you mean 'keep_last'"),
        ({"xyzzy": 4}, "has no option 'xyzzy'$"),
        ({"retentions": 4}, "has no option 'retentions'$"),
    ],
)
def test_an_option_that_is_misspelled_is_named(options: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=text):
        CheckpointManager(tmp_path, **options)


@pytest.mark.parametrize("count", ["four", 0, -1, 2.5, True])
def test_a_number_of_virtual_ranks_that_is_none_is_refused(count: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"virtual_ranks is {count!r}; use a positive number, or 'auto'"):
        CheckpointManager(tmp_path, virtual_ranks=count)


@pytest.mark.parametrize(
    ("chose", "step", "steps", "says"),
    [(False, 5, 5, True), (True, 5, 5, False), (False, 0, 5, False), (False, 5, 3, False)],
)
def test_what_a_default_removes_is_said_before(
    chose: bool, step: int, steps: int, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    manager: Any = object.__new__(CheckpointManager)
    manager._chose_retention, manager._ranks = chose, SimpleNamespace(is_first=True)
    manager._node = Mock()
    manager._node.connection.tiers.durable.steps.return_value = list(range(steps))
    manager._say_what_is_removed(step)
    assert ("2 older ones are removed after the next commit" in capsys.readouterr().err) == says
