from __future__ import annotations

import json

import pytest

from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.manifest import FileEntry, Manifest, _self_digest

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


@pytest.mark.parametrize("name", ["../evil", "a/../b", "a//b", "/a", "a/", "", ".", "..", "manifest.json", "a\0b"])
def test_names_cannot_point_outside(name: str) -> None:
    evil = Manifest("run", 0, 1, 1, 1, 0.0, (FileEntry(name, 1, "d"),))
    with pytest.raises(InvalidCheckpoint, match="not allowed"):
        Manifest.from_json(evil.to_json(), "here")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"{}", b'{"format_version": 99}', b"[" * 100000])
def test_foreign_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.from_json(data, "here")


def test_a_newer_format_says_what_this_release_reads() -> None:
    document = json.loads(MANIFEST.to_json()) | {"format_version": 3}
    with pytest.raises(InvalidCheckpoint, match="format version 3; this release reads 1 and 2"):
        Manifest.from_json(json.dumps(document).encode(), "here")


def forged(**fields: object) -> bytes:
    """A manifest with other fields and a digest of itself that is right."""
    body = {**json.loads(MANIFEST.to_json()), **fields}
    del body["manifest_digest"]
    return json.dumps({**body, "manifest_digest": _self_digest(body)}).encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created_at", 10**400),  # OverflowError, once
        ("created_at", float("inf")),
        ("created_at", float("nan")),
        ("created_at", "1.5"),
        ("metrics", {"eval_loss": 10**400}),
        ("metrics", {"\ud800": 1.0}),
        ("step", 2**63),  # no room for it in a heartbeat
        ("run_id", "\ud800"),  # cannot be printed
        ("files", [{"name": "\ud800", "size": 1, "digest": "d"}]),
        ("files", [{"name": "model", "size": 1, "digest": "d"}, {"name": "model", "size": 2, "digest": "e"}]),
        ("files", [{"name": "x" * 5000, "size": 1, "digest": "d"}]),  # the text that says it is missing quotes it
        ("folder", "checkpoint-٣/1.ab"),
    ],
)
def test_odd_values_are_refused_though_the_digest_is_right(field: str, value: object) -> None:
    with pytest.raises(InvalidCheckpoint, match="lacks or mistypes a field") as caught:
        Manifest.from_json(forged(**{field: value}), "here")
    str(caught.value).encode()


def test_deep_nesting_is_refused_at_any_depth() -> None:
    """There are depths that the parser takes and the encoder of the digest does not."""
    for depth in [*range(800, 1010), 5000, 100_000]:
        for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            with pytest.raises(InvalidCheckpoint):
                Manifest.from_json(b'{"format_version": 1, "x": %s}' % nested.encode(), "here")


def test_errors_can_be_read_at_a_glance() -> None:
    for field in ("run_id", "step", "metrics", "folder", "format_version"):
        with pytest.raises(InvalidCheckpoint) as caught:
            Manifest.from_json(forged(**{field: ["x" * 100_000]}), "here")
        assert len(str(caught.value)) < 300
