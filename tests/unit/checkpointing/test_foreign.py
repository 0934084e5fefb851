"""What others have put, or a disk has left, beside the checkpoints."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from checkpointing.storage import LocalStorage, open_storage
from checkpointing.storage.base import Fence


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"3",
        b"\xff",
        b"[" * 3000,
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
    [b"", b"[]", b"\xff", b"[" * 3000, b'{"attempt": 1e999}', b'{"attempt": "x"}', b'{"attempt": 1e30}', b"{}"],
)
def test_a_damaged_note_is_replaced_by_the_next(damaged: bytes, tmp_path: Path) -> None:
    storage, note = LocalStorage(tmp_path), json.dumps({"attempt": 3}).encode()
    storage.write_note(damaged)
    storage.replace_note(note)
    assert storage.read_note() == note


@pytest.mark.parametrize("number", ["007", "٣", "²", "+5", "-1", "5 ", "5\n", "9" * 230])
def test_what_is_only_nearly_named_like_a_checkpoint_is_none(number: str, tmp_path: Path) -> None:
    """`checkpoint-007` was listed as step 7, which could not be set aside: no attempt could resume any more."""
    storage = LocalStorage(tmp_path)
    (tmp_path / f"checkpoint-{number}").mkdir()
    assert storage.steps() == [] and storage.set_aside_names() == [] and storage.sweep() == []


@pytest.mark.parametrize("number", ["007", "٣", "9" * 230])
def test_a_foreign_object_is_neither_fence_nor_checkpoint(number: str) -> None:
    """`fence/007.json` was listed as fence 7, which was not there: it was looked for until the stack was full."""
    storage = open_storage(f"memory://{uuid.uuid4().hex}/runs")
    storage.store.put(f"fence/{number}.json", b"foreign")  # type: ignore[attr-defined]
    storage.store.put(f"checkpoint-{number}/manifest.json", b"foreign")  # type: ignore[attr-defined]
    assert storage.fence() == Fence() and storage.steps() == [] and storage.sweep() == []


def test_a_fence_that_is_listed_but_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}/runs")
    storage.begin_attempt(3)
    monkeypatch.setattr(storage.store, "get", lambda key: None)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"fence/3\.json is listed, but cannot be read"):
        storage.fence()
