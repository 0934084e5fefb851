"""The shards of a checkpoint, read from where they are."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from helpers.spread_checkpoint import FILE, NAME, ROWS, commit_spread, spread

from checkpointing.commit import shard_reading
from checkpointing.commit.shard_reading import PartCache, Recorded, ShardReaders, read_range, recorded_files
from checkpointing.storage import LocalStorage


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Recorded]:
    storage = LocalStorage(tmp_path)
    return recorded_files(storage, commit_spread(storage, 5, ROWS))


def whole(readers: ShardReaders) -> bytes:
    target = bytearray(len(FILE))
    read_range(spread(ROWS)[0].files[NAME], readers, 0, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("mapped", [True, False])
def test_shards_are_read_from_files(mapped: bool, files: dict[str, Recorded]) -> None:
    readers = ShardReaders(files, mapped=mapped)
    assert whole(readers) == FILE and readers(1) is readers(1)


def test_what_is_in_memory_is_not_read(files: dict[str, Recorded]) -> None:
    held = {rank: memoryview(shard) for rank, shard in enumerate(spread(ROWS)[1])}
    assert whole(ShardReaders({}, held)) == FILE
    with pytest.raises(ValueError, match=r"shards/1\.bin has 64 bytes, not 65"):
        list(ShardReaders({}, held)(1).read(0, 65))


@pytest.mark.parametrize("lacking", ["shards/1.bin", "shards/1.parts.json"])
def test_a_file_that_is_missing_is_named(lacking: str, files: dict[str, Recorded]) -> None:
    del files[lacking]
    with pytest.raises(ValueError, match=f"{lacking} is not among its files"):
        whole(ShardReaders(files))


def test_digests_of_other_parts_are_refused(files: dict[str, Recorded]) -> None:
    files["shards/1.parts.json"] = files["shards/0.parts.json"]
    with pytest.raises(ValueError, match=r"shards/1\.parts\.json was altered"):
        whole(ShardReaders(files))


def test_a_mapped_shard_that_was_altered_is_found_and_what_was_verified_is_not_digested_again(
    files: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = ShardReaders(files)
    assert whole(readers) == FILE
    monkeypatch.setattr(shard_reading, "part_digests", lambda data, numbers: dict.fromkeys(numbers, b"other"))
    assert whole(readers) == FILE
    with pytest.raises(ValueError, match=r"shards/0\.bin was altered: a part of it has another digest"):
        whole(ShardReaders(files))


def test_whoever_goes_through_all_shards_side_by_side_reads_each_part_once() -> None:
    cache, made = PartCache(most=64), list[tuple[str, int]]()

    def part(name: str, number: int) -> memoryview:
        made.append((name, number))
        return memoryview(b"")

    for number in range(3):
        for _ in range(5):
            for name in map(str, range(40)):
                cache.get((name, number), functools.partial(part, name, number))
    assert len(made) == len(set(made)) == 3 * 40
    # No more than one of each shard.
    assert len(cache._parts) == 40


def test_more_shards_than_memory_allows_are_partly_kept() -> None:
    """Were the oldest dropped, each would be dropped just before it is wanted again."""
    cache, made = PartCache(8, most=20), list[int]()
    for _ in range(10):
        for shard in range(25):
            cache.get((str(shard), 0), lambda shard=shard: made.append(shard) or memoryview(b""))  # type: ignore[misc,func-returns-value]
    assert len(cache._parts) == 20 and len(made) < 25 + 10 * 8


@pytest.mark.parametrize(("num_shards", "kept"), [(2, 8), (100, 64)])
def test_memory_for_parts_is_limited(num_shards: int, kept: int) -> None:
    cache = PartCache(most=64)
    for number in range(20):
        for shard in range(num_shards):
            cache.get((str(shard), number), lambda: memoryview(b""))
    assert len(cache._parts) == kept
