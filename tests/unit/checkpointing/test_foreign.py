"""What others have put, or a disk has left, beside the checkpoints."""

from __future__ import annotations

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
