"""What others have put, or a disk has left, beside the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpointing.storage import LocalStorage


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"3",
        b"\xff",
        b"[" * 100_000,
        b'{"attempt": 1}',
        b'{"attempt": 1e999, "accepted": [], "writer": ""}',  # OverflowError, once
        b'{"attempt": 1, "accepted": [[1e999, 1]], "writer": ""}',
        b'{"attempt": "2", "accepted": [], "writer": ""}',
        b'{"attempt": 1.5, "accepted": [], "writer": ""}',
        b'{"attempt": -1, "accepted": [], "writer": ""}',
        b'{"attempt": 9223372036854775808, "accepted": [], "writer": ""}',
        b'{"attempt": 1, "accepted": [[1, 2, 3]], "writer": ""}',
    ],
)
def test_a_damaged_fence_is_told_with_its_name_and_the_mend(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / ".fence.json").write_bytes(damaged)
    with pytest.raises(OSError, match=r"\.fence\.json: .*; remove it if no run writes here"):
        LocalStorage(tmp_path).fence()


@pytest.mark.parametrize(
    "damaged",
    [b"", b"[]", b"\xff", b"[" * 100_000, b'{"attempt": 1e999}', b'{"attempt": "x"}', b'{"attempt": 1e30}', b"{}"],
)
def test_a_damaged_note_is_replaced_by_the_next(damaged: bytes, tmp_path: Path) -> None:
    storage, note = LocalStorage(tmp_path), json.dumps({"attempt": 3}).encode()
    storage.write_note(damaged)
    storage.replace_note(note)
    assert storage.read_note() == note
