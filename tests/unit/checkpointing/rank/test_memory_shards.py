"""Which snapshots in shares all ranks can resume from in memory."""

from __future__ import annotations

import pytest
from spread_checkpoint import NAME, ROWS, files_of, spread

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.digest import digest_buffer
from checkpointing.errors import InvalidCheckpoint
from checkpointing.manifest import SnapshotInfo
from checkpointing.rank.memory_shards import CommonPieces, NodeShare, newest_attempt, resumable, shares_by_step
from checkpointing.rank.spread_files import open_share
from checkpointing.rank.torch_reader import model_state
from checkpointing.shard_reading import ShardReaders
from checkpointing.shards import INDEX_NAME, shard_name


def ignore(reason: str, *, damaged: bool) -> None:
    """Take a fault."""


def share(*ranks: int, attempt: int = 1, identity: str = "ab", world_size: int = 4) -> NodeShare:
    return NodeShare(attempt, identity, world_size, frozenset(ranks))


def test_a_share_is_described_by_its_shards() -> None:
    files = {name: memoryview(b"x") for name in (shard_name(2), shard_name(3), INDEX_NAME)}
    info = SnapshotInfo("run", 3, 7, 4, 7)
    spread_out = OfferedSnapshot(info, files, {}, save="ab")
    whole = OfferedSnapshot(info, {}, {})
    assert shares_by_step([whole, spread_out]) == {7: share(2, 3, attempt=3)}
    assert shares_by_step([whole]) == {}


FIRST, SECOND = share(0, 1), share(2, 3)


@pytest.mark.parametrize(
    ("offers", "found"),
    [
        ([{7: FIRST}, {7: FIRST}, {7: SECOND}, {7: SECOND}], {7: 1}),
        # A node was lost, or replaced.
        ([{7: FIRST}, {7: FIRST}, {}, {}], {}),
        # The ranks have changed places.
        ([{7: SECOND}, {7: SECOND}, {7: FIRST}, {7: FIRST}], {}),
        # There are more or fewer ranks.
        ([{7: FIRST}, {7: FIRST}], {}),
        # Another save of the same step.
        ([{7: FIRST}, {7: FIRST}, *[{7: share(2, 3, identity="cd")}] * 2], {}),
        # An older step that all have is used in place of a newer one.
        ([*[{7: FIRST, 8: share(0, 1)}] * 2, *[{7: SECOND}] * 2], {7: 1}),
        # What an earlier attempt has left, once a newer one has made snapshots.
        ([*[{9: FIRST, 5: share(0, 1, attempt=2)}] * 2, *[{9: SECOND}] * 2], {}),
        ([{}, {}, {}, {}], {}),
    ],
)
def test_all_ranks_need_their_own_shard_on_their_node(
    offers: list[dict[int, NodeShare]], found: dict[int, int]
) -> None:
    assert resumable(offers) == found


def test_what_a_newer_attempt_has_left_otherwise_counts_too() -> None:
    offers = [{7: FIRST}, {7: FIRST}, {7: SECOND}, {7: SECOND}]
    assert newest_attempt(offers) == 1 and newest_attempt([{}, {}]) == 0
    assert (resumable(offers, 1), resumable(offers, 2)) == ({7: 1}, {})


def test_the_first_rank_sends_what_all_need_of_its_shard() -> None:
    index, _ = spread(ROWS)
    contents = files_of(ROWS)
    views = {name: memoryview(data) for name, data in contents.items() if name.startswith("shards/")}
    held = {0: views[shard_name(0)]}
    pieces = CommonPieces.read_from(ShardReaders({}, held)(0), index)
    assert pieces and sum(map(len, pieces.values())) == sum(piece.nbytes for piece in index.files[NAME].common)
    files = {name: (views[name], digest_buffer(views[name])) for name in (shard_name(1), INDEX_NAME)}
    faults: list[tuple[str, bool]] = []
    other = open_share("here", files, views[INDEX_NAME], 1, lambda reason, *, damaged: faults.append((reason, damaged)))
    other.add_common_pieces(pieces)
    state = model_state(other.open(NAME))
    assert set(state) == {"weight", "norm"}
    # The rest of that shard was not sent: this is noticed, and the snapshot is not used again, though not damaged.
    with pytest.raises(InvalidCheckpoint, match="a shard of another node is needed"):
        other.fill(NAME, state)
    assert faults == [("a shard of another node is needed, which is not in this node's memory", False)]


def test_a_rank_verifies_its_own_shard() -> None:
    contents = files_of(ROWS)
    views = {name: memoryview(data) for name, data in contents.items() if name.startswith("shards/")}
    files = {name: (view, digest_buffer(view)) for name, view in views.items()}
    altered = bytearray(views[shard_name(1)])
    altered[3] ^= 1
    files[shard_name(1)] = (memoryview(altered), files[shard_name(1)][1])
    open_share("here", files, views[INDEX_NAME], 0, ignore)
    with pytest.raises(InvalidCheckpoint, match=r"shards/1\.bin was altered"):
        open_share("here", files, views[INDEX_NAME], 1, ignore)
    with pytest.raises(InvalidCheckpoint, match="matches its digest but cannot be read"):
        open_share("here", files, memoryview(b"{}"), 0, ignore)
