from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format import digest
from checkpointing.format.digest import (
    ALGORITHM,
    PLAIN,
    RunningDigest,
    added,
    algorithm_of,
    digest_buffer,
    digest_file,
    digest_of_parts,
    num_parts,
    part_digests,
    word_sum,
)
from checkpointing.resume.verified_read import DigestShares, altered_file, altered_files

PART = 1000


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "PART_BYTES", PART)
        yield


@given(st.binary(max_size=4 * PART), st.lists(st.integers(1, 2 * PART), max_size=9), st.integers(1, 4))
def test_a_digest_is_the_same_however_the_bytes_come(data: bytes, cuts: list[int], num_ranks: int) -> None:
    whole = digest_buffer(data)
    running, view = RunningDigest(), memoryview(data)
    for cut in [*cuts, len(data)]:
        running.update(view[:cut])
        view = view[cut:]
    assert running.result() == whole
    parts: dict[int, bytes] = {}
    for rank in range(num_ranks):
        parts |= part_digests(memoryview(data), range(rank, num_parts(len(data)), num_ranks), num_threads=2)
    assert digest_of_parts(parts[number] for number in range(num_parts(len(data)))) == whole


@pytest.mark.parametrize("nbytes", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
def test_by_its_definition(nbytes: int, tmp_path: Path) -> None:
    data = os.urandom(nbytes)
    parts = b"".join(xxhash.xxh3_128_digest(data[start : start + PART]) for start in range(0, nbytes, PART))
    assert digest_buffer(data) == f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(parts)}"
    assert digest_buffer(data, PLAIN) == f"{PLAIN}:{xxhash.xxh3_128_hexdigest(data)}"
    (tmp_path / "f").write_bytes(data)
    assert digest_file(tmp_path / "f") == digest_buffer(data)
    assert digest_file(tmp_path / "f", PLAIN) == digest_buffer(data, PLAIN)


def test_algorithms_that_are_not_known_are_refused() -> None:
    assert {algorithm_of(digest_buffer(b"", name)) for name in (ALGORITHM, PLAIN)} == {ALGORITHM, PLAIN}
    with pytest.raises(ValueError, match="does not know"):
        algorithm_of("sha256:00")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_find_a_flipped_bit_in_whosever_share_it_is(num_ranks: int) -> None:
    data = os.urandom(5 * PART + 7)
    recorded = digest_buffer(data)

    def found(seen: bytes) -> str | None:
        shares = [DigestShares(rank, num_ranks) for rank in range(num_ranks)]
        for one in shares:
            one.add("model.safetensors", recorded, memoryview(seen))
        # Each has looked at its own parts alone.
        assert sum(len(one.files["model.safetensors"][2]) for one in shares) == 6
        return altered_file(shares)

    assert found(data) is None
    for position in range(0, len(data), PART // 2):
        damaged = bytearray(data)
        damaged[position] ^= 1
        problem = found(bytes(damaged))
        # With what was read, so that two reads can be compared.
        assert problem is not None and problem.startswith("model.safetensors was altered")
        assert digest_buffer(bytes(damaged)) in problem


def test_each_node_is_judged_by_its_own_ranks() -> None:
    """Of three nodes with two, one and two ranks, the last one has met other bytes."""
    data = os.urandom(4 * PART)
    damaged = bytes([data[0] ^ 1]) + data[1:]
    shares = [DigestShares(0, 2), DigestShares(1, 2), DigestShares(0, 1), DigestShares(0, 2), DigestShares(1, 2)]
    for number, one in enumerate(shares):
        one.add("f", digest_buffer(data), memoryview(damaged if number == 3 else data))
    ((rank, what),) = altered_files(shares)
    assert rank == 3 and what.startswith("f was altered")


DATA = random.Random(1).randbytes(1003)


@pytest.mark.parametrize("cuts", [(), (8,), (5,), (1, 2, 3), (8, 9, 500, 501), (999, 1000)])
def test_parts_add_up_to_the_whole(cuts: tuple[int, ...]) -> None:
    places = [0, *cuts, len(DATA)]
    parts = [word_sum(DATA[begin:end], begin) for begin, end in itertools.pairwise(places)]
    assert added(parts) == word_sum(DATA)


def test_any_bit_that_flips_changes_it() -> None:
    for position in range(0, len(DATA), 7):
        for bit in range(8):
            other = bytearray(DATA)
            other[position] ^= 1 << bit
            assert word_sum(bytes(other)) != word_sum(DATA)


def test_nothing_is_zero_and_carries_wrap() -> None:
    assert word_sum(b"") == 0 == word_sum(b"\0" * 9)
    assert word_sum(b"\xff" * 16) == (1 << 64) - 2
