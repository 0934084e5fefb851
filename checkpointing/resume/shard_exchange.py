"""Ranks read parts of shards from the memory of other nodes, through the process group, while they restore.

Each rank asks for what it needs when it needs it: what that is depends on its mesh, which need not be the one that the
shards were written on. Requests are answered by a thread of the rank that has verified the shard; who has asked
verifies what has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.commit.shard_reading import PartCache, PartReader, ShardReader, in_memory
from checkpointing.errors import InvalidCheckpoint
from checkpointing.files.spread_files import SpreadFiles
from checkpointing.format.shard_index import ShardParts, shard_name
from checkpointing.process.ranks import Ranks
from checkpointing.resume.memory_shards import HeldShards

_REQUEST, _ANSWER = 1, 2
_NO_MORE = -1


class ShardExchange:
    """Answers requests from construction to `close`; all ranks construct and close it together.

    Args:
        ranks: This rank, with a group that nothing else uses.
        served: The shards that others read from this rank, verified, by the rank that wrote them.
    """

    def __init__(self, ranks: Ranks, served: Mapping[int, memoryview]) -> None:
        self._ranks, self._served = ranks, served
        self._thread = threading.Thread(target=self._serve, name="checkpoint-shards", daemon=True)
        self._thread.start()

    def reader(self, server: int, shard: int) -> Callable[[int, memoryview], None]:
        """Return a function that fills memory with a shard's bytes from a place on, as `PartReader` uses it.

        It raises OSError where the other rank is gone.
        """

        def read(start: int, memory: memoryview) -> None:
            try:
                self._ranks.send(_numbers(shard, start, len(memory)), server, _REQUEST)
                self._ranks.receive(torch.frombuffer(memory, dtype=torch.uint8), server, _ANSWER)
            except RuntimeError as error:
                raise OSError(f"rank {server}, which holds a shard, does not answer: {error}") from error

        return read

    def close(self) -> None:
        """Wait until no rank reads any more, and end the thread."""
        self._ranks.barrier()
        self._ranks.send(_numbers(_NO_MORE, 0, 0), (self._ranks.rank + 1) % self._ranks.world_size, _REQUEST)
        self._thread.join()
        # What was sent last has arrived before the group is closed.
        self._ranks.barrier()
        self._ranks.close_group()

    def _serve(self) -> None:
        request = _numbers(0, 0, 0)
        while True:
            try:
                sender = self._ranks.receive(request, None, _REQUEST)
                shard, start, nbytes = request.tolist()
                if shard == _NO_MORE:
                    return
                part = self._served[shard][start : start + nbytes]
                self._ranks.send(torch.frombuffer(part, dtype=torch.uint8), sender, _ANSWER)
            # Of torch.distributed: a rank is gone, which the training thread finds by its own calls.
            except RuntimeError:
                return


def connect(spread: SpreadFiles, ranks: Ranks, held: HeldShards, share: OfferedSnapshot | None) -> None:
    """Let every rank read all shards of a snapshot in memory; called by all together.

    Args:
        spread: The snapshot's files, with the shards that this rank has verified.
        ranks: This rank, with a group that the training thread uses.
        held: Who serves which shard.
        share: What this rank's node holds, if anything.

    Raises:
        InvalidCheckpoint: What all ranks need cannot be read; on all of them.
    """
    parts: dict[int, ShardParts] = {}
    for theirs in ranks.gather(spread.served):
        parts |= theirs
    exchange = None
    if ranks.local_world_size < ranks.world_size:
        assert share is not None or not spread.served
        views = {shard: share.files[shard_name(shard)] for shard in spread.served} if share is not None else {}
        exchange = ShardExchange(ranks.with_new_group(), views)
    cache, readers = PartCache(), dict[int, ShardReader]()
    for shard, server in held.servers.items():
        name = shard_name(shard)
        if share is not None and name in share.files:
            # Its own, or a copy of another node's.
            readers[shard] = in_memory(name, share.files[name], parts[shard])
        else:
            assert exchange is not None
            readers[shard] = PartReader(parts[shard], exchange.reader(server, shard), cache, name)
    spread.read_from(readers, exchange.close if exchange is not None else lambda: None)
    if exchange is not None:
        # At once, where otherwise all ranks would ask for them.
        pieces: dict[int, bytes] | InvalidCheckpoint = {}
        if ranks.is_first:
            try:
                pieces = spread.common_pieces()
            except InvalidCheckpoint as error:
                pieces = error
        pieces = ranks.broadcast(pieces)
        if isinstance(pieces, InvalidCheckpoint):
            raise pieces
        spread.add_common_pieces(pieces)


def _numbers(shard: int, start: int, nbytes: int) -> torch.Tensor:
    return torch.tensor([shard, start, nbytes], dtype=torch.int64)
