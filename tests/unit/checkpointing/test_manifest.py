from __future__ import annotations

import json

import pytest

from checkpointing.errors import InvalidCheckpoint
from checkpointing.manifest import FileEntry, Manifest

MANIFEST = Manifest("run", 3, 40, 2, 640, 1.5, (FileEntry("model.safetensors", 10, "xxh3_128:ab"),))


def test_round_trip() -> None:
    assert Manifest.from_json(MANIFEST.to_json(), "here") == MANIFEST


def test_every_flipped_bit_is_seen_or_harmless() -> None:
    """A flip in whitespace may pass, but then nothing that was read differs."""
    data = MANIFEST.to_json()
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        try:
            assert Manifest.from_json(bytes(flipped), "here") == MANIFEST
        except InvalidCheckpoint as error:
            assert "here" in str(error)


@pytest.mark.parametrize("length", range(0, len(MANIFEST.to_json()), 7))
def test_every_truncation_is_seen(length: int) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.from_json(MANIFEST.to_json()[:length], "here")


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".", "..", "manifest.json", "a\0b"])
def test_names_cannot_point_outside(name: str) -> None:
    evil = Manifest("run", 0, 1, 1, 1, 0.0, (FileEntry(name, 1, "d"),))
    with pytest.raises(InvalidCheckpoint, match="not allowed"):
        Manifest.from_json(evil.to_json(), "here")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"{}", b'{"format_version": 99}', b"[" * 100000])
def test_foreign_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.from_json(data, "here")


def test_a_newer_format_says_what_this_release_reads() -> None:
    document = json.loads(MANIFEST.to_json()) | {"format_version": 2}
    with pytest.raises(InvalidCheckpoint, match="format version 2; this release reads 1"):
        Manifest.from_json(json.dumps(document).encode(), "here")
