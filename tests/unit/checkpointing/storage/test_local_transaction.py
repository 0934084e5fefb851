"""Checkpoints in a directory: what a failed save leaves behind. The contract is in tests/contract."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage import LocalStorage


@pytest.mark.parametrize(("notes", "remains"), [(1, False), (4, False), (9, True)])
def test_a_note_that_comes_while_a_save_is_removed(
    notes: int, remains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another node; if it does not stop writing, the sweep of the next attempt removes what is there."""
    transaction = LocalStorage(tmp_path).begin(3, 1)
    (temporary,) = tmp_path.iterdir()
    real, left = os.rmdir, [notes]

    def rmdir(path: Any, *rest: Any, **where: Any) -> None:
        if left[0]:
            left[0] -= 1
            (temporary / f"note-{left[0]}").touch()
        real(path, *rest, **where)

    monkeypatch.setattr(os, "rmdir", rmdir)
    transaction.abort()
    assert temporary.exists() is remains
