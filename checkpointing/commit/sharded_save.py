"""A checkpoint that several nodes write: each its shards, and one of them the manifest.

The nodes talk through the storage itself. The node that commits begins with a file that says so, for which the others
wait; it does so as soon as it has the snapshot, even where it has yet to write an earlier one. Each of these then gives
signs of life in a note of its own, writes its shards, and for each the digests of its parts, once; or its note says why
it could not. The node that commits waits for the digests of all shards. A crash of either side leaves files that no
manifest names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from checkpointing.commit.protocol import CommitSteps
from checkpointing.commit.save_notes import OtherNodeFailed, SignsOfLife, await_note, await_reports, is_committed
from checkpointing.errors import CommitFailed
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import FileEntry, SnapshotInfo
from checkpointing.format.shard_index import BEGUN_NAME, HeldFile, ShardParts, parts_name, state_name
from checkpointing.host.failpoints import failpoint
from checkpointing.host.threads import in_background
from checkpointing.storage import Storage
from checkpointing.storage.base import Transaction

# Without a sign of life from a node, for so long, it is given up; when its attempt is over, the shorter one.
PATIENCE_S = 30.0
LAST_PATIENCE_S = 5.0
# A node that lives, but does not get on; when its attempt is over, ranks wait for this.
LONGEST_S = 3600.0
LAST_LONGEST_S = 600.0
_LOOKS_AT_ONCE = 16
_SHARED_QUESTION = (
    "Do all nodes reach this location (a shared volume, or object storage)? State that no node holds whole needs one"
)


@dataclass(frozen=True)
class ShardedSave:
    """A save that several nodes write.

    Attributes:
        identity: Of the save, in hexadecimal digits; all nodes have the same.
        shards: The names of all shards.
        in_memory: Whether ranks may resume from what the nodes have of it in memory.
    """

    identity: str
    shards: tuple[str, ...]
    in_memory: bool = True


class ShardedCommit(CommitSteps):
    """The part of the node that commits.

    Args:
        storage: Where to.
        info: What the shards are of.
        save: The save.
        prepare: Called before it begins; may raise a CheckpointError.
        is_current: Whether the attempt that made the snapshot runs still; otherwise the other nodes get less time.
        clock: Seconds.
        sleep: Waits.
    """

    def __init__(
        self,
        storage: Storage,
        info: SnapshotInfo,
        save: ShardedSave,
        *,
        prepare: Callable[[], None] = lambda: None,
        is_current: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._storage, self._info, self._save, self._prepare = storage, info, save, prepare
        self._is_current, self._clock, self._sleep = is_current, clock, sleep
        self._data = json.dumps({"save": save.identity}).encode()
        self._begun: Callable[[], Transaction] = functools.cache(self._begin)

    def begin_now(self) -> None:
        """Begin in the background, before the save's turn comes: the other nodes write meanwhile."""
        # Under a limit of threads, at its turn.
        with contextlib.suppress(RuntimeError):
            self._begun = in_background(self._begun, "checkpoint-begin").result

    def begin(self, storage: Storage, info: SnapshotInfo) -> Transaction:
        """Wait until it has begun."""
        return self._begun()

    def _begin(self) -> Transaction:
        self._prepare()
        storage, info, transaction = self._storage, self._info, None
        try:
            transaction = storage.begin(info.step, info.attempt, self._save.identity)
            transaction.write_note(BEGUN_NAME, self._data)
        except OSError as error:
            if transaction is not None:
                # It may have been stored, and the answer lost.
                transaction.abort()
            raise CommitFailed(
                f"checkpoint-{info.step} at {storage.location} could not be begun: {error.strerror or error}"
            ) from error
        return transaction

    def complete(self, transaction: Transaction, own: Callable[[], list[FileEntry]]) -> list[FileEntry]:
        """Wait for the digests of the other nodes' shards, which are files of the checkpoint, too."""
        entries = own()
        mine = {entry.name for entry in entries}
        names = [name for name in self._save.shards if name not in mine]
        found: dict[str, tuple[ShardParts, bytes]] = {}

        def take(name: str, note: bytes) -> None:
            found[name] = (_read(note, name), note)

        def limits() -> tuple[float, float]:
            return (PATIENCE_S, LONGEST_S) if self._is_current() else (LAST_PATIENCE_S, LAST_LONGEST_S)

        look = functools.partial(_look, transaction)
        try:
            await_reports(names, look, take, limits, clock=self._clock, sleep=self._sleep)
        except OtherNodeFailed as failed:
            raise CommitFailed(_missing(failed)) from None
        # They are not part of the checkpoint; one that comes later does no harm.
        transaction.withdraw([state_name(name) for name in names])
        entries.append(FileEntry(BEGUN_NAME, len(self._data), digest_buffer(self._data)))
        for name, (parts, note) in found.items():
            entries.append(FileEntry(name, parts.nbytes, parts.digest))
            entries.append(FileEntry(parts_name(name), len(note), digest_buffer(note)))
        return entries

    def abandon(self) -> None:
        """Remove the note that it has begun."""
        with contextlib.suppress(Exception):
            self._begun().abort()


def write_shards(
    storage: Storage,
    info: SnapshotInfo,
    save: ShardedSave,
    shards: Sequence[HeldFile],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Write the shards of a node that does not commit; return their size in bytes.

    Args:
        storage: Where to.
        info: What they are of.
        save: The save.
        shards: This node's.
        clock: Seconds.
        sleep: Waits.

    Raises:
        CommitFailed: Storage refused, which the node that commits learns if that can be written; or that node has not
            begun the save, or has given it up.
    """
    names = [shard.name for shard in shards]
    own = [*names, *map(parts_name, names)]
    try:
        transaction = storage.begin(info.step, info.attempt, save.identity, joins=True)
        if await_note(transaction, BEGUN_NAME, PATIENCE_S, clock, sleep) is None:
            raise CommitFailed(
                f"the node that commits has not begun this save here for {PATIENCE_S:.0f} s. {_SHARED_QUESTION}"
            )
        signs = SignsOfLife(transaction, state_name(names[0]))
        try:
            is_given_up = False
            for shard in shards:
                is_given_up = shard is not shards[0] and transaction.read_note(BEGUN_NAME) is None
                if is_given_up:
                    break
                transaction.write(shard.name, [shard.data])
                failpoint("shard.written")
                note = shard.parts().to_json()
                if shard is shards[-1]:
                    # The node that commits removes the note once it has all digests.
                    signs.end()
                transaction.write_note(parts_name(shard.name), note)
                failpoint("shard.reported")
        except OSError as error:
            if not _is_reported(storage, info, transaction, names[-1]):
                signs.end(error.strerror or str(error))
                raise
        finally:
            signs.end()
        # A directory is removed, or renamed, with all in it.
        if is_given_up or (storage.root is None and transaction.read_note(BEGUN_NAME) is None):
            transaction.withdraw([*own, state_name(names[0])])
            raise CommitFailed(f"the node that commits has given up checkpoint-{info.step}")
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommitFailed(
            f"this node's share of checkpoint-{info.step} at {storage.location} could not be written: {reason}"
        ) from error
    return sum(len(shard.data) for shard in shards)


def _is_reported(storage: Storage, info: SnapshotInfo, transaction: Transaction, last: str) -> bool:
    """Return whether the digests of a node's last shard can be read, also where writing them seemed to fail.

    The node that commits then needs no more of this one, and a note of the error might come after the checkpoint. It
    may have committed meanwhile: in a directory, nothing is left under the save's own name then.
    """
    with contextlib.suppress(OSError):
        return transaction.read_note(parts_name(last)) is not None or is_committed(storage, info)
    return False


def _look(transaction: Transaction, names: Sequence[str]) -> list[tuple[bytes | None, bytes | None]]:
    """Return, for each shard, the digests of its parts, or else its node's sign of life: that of its first shard.

    Raises:
        OSError: Storage refused.
    """

    def notes_of(name: str) -> tuple[bytes | None, bytes | None]:
        note = transaction.read_note(parts_name(name))
        return note, transaction.read_note(state_name(name)) if note is None else None

    # Hundreds of ranks would otherwise be asked for one after the other.
    with ThreadPoolExecutor(_LOOKS_AT_ONCE, "checkpoint-look") as pool:
        return list(pool.map(notes_of, names))


def _missing(failed: OtherNodeFailed) -> str:
    """Return why a save is given up."""
    if failed.error is not None:
        return f"another node could not write {failed.name}: {failed.error}"
    if failed.is_alone:
        # Most likely a directory that each node has for itself.
        return (
            f"{failed.name} was not written: no other node has written anything here for {failed.silent_s:.0f} s. "
            f"{_SHARED_QUESTION}"
        )
    if failed.silent_s < min(failed.waited_s, LAST_PATIENCE_S):
        return f"{failed.name} was not written within {failed.waited_s:.0f} s, although its node lives"
    return f"{failed.name} was not written: its node has given no sign of life for {failed.silent_s:.0f} s"


def _read(note: bytes, name: str) -> ShardParts:
    """Parse the digests of a shard.

    Raises:
        CommitFailed: They cannot be read.
    """
    try:
        return ShardParts.from_json(note)
    except ValueError as error:
        raise CommitFailed(f"the digests of {name} cannot be read: {error}") from None
