"""Which saves and loads are protected, and what is reported of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_dcp import Reports, commit_and_verify, dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.agent.events import CommitFailedEvent
from checkpointing.dcp import protect
from checkpointing.dcp.protected_calls import _cause
from checkpointing.dcp.seam import DCP
from checkpointing.errors import CheckpointError, InvalidCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    return commit_and_verify(monkeypatch)


def test_a_second_call_changes_nothing(reports: Reports) -> None:
    before = state_dict_saver._save_state_dict
    protect()
    assert state_dict_saver._save_state_dict is before


def test_a_torch_with_other_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict_saver, "_save_state_dict", lambda: None)
    monkeypatch.delattr(dcp.filesystem, "_StoragePrefix")
    with pytest.raises(CheckpointError, match=r"has no torch\.distributed.checkpoint\.filesystem\._StoragePrefix"):
        protect()


def test_the_table_names_what_is_there() -> None:
    DCP.check()


def test_a_function_that_was_imported_before_is_protected_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = dcp.save
    reports = commit_and_verify(monkeypatch)
    save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "step-3"))
    assert [one.step for one in reports] == [3]


def test_a_save_in_the_background_that_fails_is_reported(tmp_path: Path, reports: Reports) -> None:
    (tmp_path / ".checkpointing").write_text("in the way")
    saved: Any = dcp.async_save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "step-3"))
    assert isinstance(saved.exception(), CheckpointException)
    [failed] = reports
    assert isinstance(failed, CommitFailedEvent) and failed.error.startswith("NotADirectoryError: ")


def test_without_collectives_a_save_is_left_alone(
    tmp_path: Path, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "step-3"), use_collectives=False, no_dist=True)
    assert not reports and "use_collectives=False no rank knows when all have saved" in capfd.readouterr().err


def test_the_cause_is_ours_where_several_ranks_fail() -> None:
    ours = InvalidCheckpoint("here", "torn")
    failed = CheckpointException("read", {0: (OSError(5, "gone"), None), 1: (ours, None)})  # type: ignore[dict-item]
    assert _cause(failed) is ours
    assert isinstance(_cause(CheckpointException("read", {2: (OSError(5, "gone"), None)})), OSError)  # type: ignore[dict-item]
    assert _cause(ours) is ours
