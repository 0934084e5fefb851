"""The digest of an epoch's order, by which a replayed order is compared with the recorded one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import xxhash

from checkpointing.data.position import Position
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import ALLOW_CHANGES_ENV, rank_settings

logger = logging.getLogger("checkpointing")

# No loader draws further ahead of training. Where nothing is saved, digests must not pile up.
_MAX_DIGESTS = 4096


class OrderDigest:
    """Digests of the indices drawn so far, one after each batch: loaders draw ahead of training."""

    def __init__(self) -> None:
        """Begin with an empty order."""
        self._digest = xxhash.xxh3_128()
        self._by_count: dict[int, str] = {}

    def reset(self) -> None:
        """Begin another epoch."""
        self._digest.reset()
        self._by_count.clear()

    def add(self, number: int, index: Any) -> None:
        """Add the index of batch `number`, counted from 0."""
        self._digest.update(_index_bytes(index))
        self._by_count[number + 1] = self._digest.hexdigest()
        if len(self._by_count) > _MAX_DIGESTS:
            for old in sorted(self._by_count)[: _MAX_DIGESTS // 2]:
                del self._by_count[old]

    @property
    def newest(self) -> str:
        """Digest of everything that was added."""
        return str(self._digest.hexdigest())

    def after(self, count: int) -> str | None:
        """Return the digest of the first `count` batches, None if unknown; forget those of fewer batches."""
        for number in [number for number in self._by_count if number < count]:
            del self._by_count[number]
        return self._by_count.get(count)


def check_order(recorded: Position, digest: str, name: str, other_ranks: tuple[int, int] | None = None) -> None:
    """Compare a replayed order with the recorded one.

    Args:
        recorded: The position that the order was replayed up to.
        digest: Of the replayed batches.
        name: Of what gives the order, for messages.
        other_ranks: Numbers of ranks then and now, where they differ.

    Raises:
        CheckpointError: The batches are others than those that training has used.
    """
    if recorded.order in (None, digest):
        return
    if rank_settings().allow_changes:
        logger.warning("%s gives other samples than before the change", name)
        return
    if other_ranks is not None:
        then, now = other_ranks
        raise CheckpointError(
            f"{name} gives other samples than before: it divides them by the number of ranks, which was {then} and is "
            f"{now}. Start {then} ranks, or train in another output_dir"
        )
    raise CheckpointError(
        f"{name} gives other samples than before: the first {recorded.consumed} batches of epoch {recorded.epoch} "
        "differ from those that the checkpoint recorded. The data set, the seed or the sampler has changed, or its "
        "order depends on something that no checkpoint holds. Use what wrote the checkpoint, another output_dir, or, "
        f"after a change of the same job, --allow-changes ({ALLOW_CHANGES_ENV}=1)"
    )


def _index_bytes(index: Any) -> bytes:
    if isinstance(index, list) and all(type(one) is int for one in index):
        return np.array(index, dtype=np.int64).tobytes()
    return repr(index).encode()
