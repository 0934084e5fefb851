"""A checkpoint that several nodes write: each its shards, and one of them the manifest.

The nodes talk through the storage itself. For every shard there is a note under the name of its `parts.json`: while the
shard is written, signs of life; then its digests, or why it could not be written. The node that
commits waits for the notes of all shards. A crash of either side leaves files that no manifest names.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.digest import digest_buffer
from checkpointing.errors import CommitFailed
from checkpointing.failpoints import failpoint
from checkpointing.manifest import FileEntry, SnapshotInfo
from checkpointing.shards import ShardParts, parts_name
from checkpointing.storage import Storage
from checkpointing.storage.base import Transaction

# Between two signs of life of a node that writes.
ALIVE_S = 1.0
# Without a sign of life from a node, for so long, it is given up; when its attempt is over, the shorter one.
PATIENCE_S = 30.0
LAST_PATIENCE_S = 5.0
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.5


@dataclass(frozen=True)
class Together:
    """A save that several nodes write.

    Attributes:
        identity: Of the save, in hexadecimal digits; all nodes have the same.
        shards: The names of all shards.
    """

    identity: str
    shards: tuple[str, ...]


@dataclass(frozen=True)
class Shard:
    """A shard in memory.

    Attributes:
        name: Its name inside the checkpoint.
        data: Its bytes.
        parts: Returns its digests, once they are known.
    """

    name: str
    data: memoryview
    parts: Callable[[], ShardParts]


def write_shards(storage: Storage, info: SnapshotInfo, together: Together, shards: Sequence[Shard]) -> int:
    """Write the shards of a node that does not commit; return their size in bytes.

    Args:
        storage: Where to.
        info: What they are of.
        together: The save.
        shards: This node's.

    Raises:
        CommitFailed: Storage refused. The node that commits learns of it, if that can be written.
    """
    try:
        transaction = storage.begin(info.step, info.attempt, together.identity)
        with _signs_of_life(transaction, [shard.name for shard in shards]) as leave:
            try:
                for shard in shards:
                    transaction.write(shard.name, [shard.data])
                    failpoint("shard.written")
                    leave(shard.name)
                    transaction.write_note(parts_name(shard.name), shard.parts().to_json())
                    failpoint("shard.reported")
            except OSError as error:
                reason = error.strerror or str(error)
                for shard in shards:
                    leave(shard.name)
                with contextlib.suppress(OSError):
                    transaction.write_note(parts_name(shards[0].name), json.dumps({"error": reason}).encode())
                raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommitFailed(
            f"this node's share of checkpoint-{info.step} at {storage.location} could not be written: {reason}"
        ) from error
    return sum(len(shard.data) for shard in shards)


@contextlib.contextmanager
def _signs_of_life(transaction: Transaction, names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Renew the note of the next shard in the background; yields a function that ends this for one of them."""
    pending, lock, over = list(names), threading.Lock(), threading.Event()
    born = time.time_ns()

    def leave(name: str) -> None:
        with lock:
            if name in pending:
                pending.remove(name)

    def renew() -> None:
        number = 0
        while not over.wait(0 if number == 0 else ALIVE_S):
            number += 1
            # One that cannot be written is missed by the node that waits, soon enough.
            with lock, contextlib.suppress(OSError):
                for name in pending[:1]:
                    transaction.write_note(parts_name(name), json.dumps({"alive": [born, number]}).encode())

    thread = threading.Thread(target=renew, name="checkpoint-alive", daemon=True)
    thread.start()
    try:
        yield leave
    finally:
        over.set()
        thread.join()


def await_shards(
    transaction: Transaction,
    names: Sequence[str],
    is_current: Callable[[], bool] = lambda: True,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[FileEntry]:
    """Wait until other nodes have written their shards; return these, and the files with their digests.

    Args:
        transaction: The save.
        names: The shards.
        is_current: Whether the attempt that made the snapshot runs still.
        clock: Seconds.
        sleep: Waits.

    Raises:
        CommitFailed: A node could not write its shards, or gives no sign of life.
        OSError: Storage refused.
    """
    found: dict[str, tuple[ShardParts, bytes]] = {}
    last: dict[str, bytes | None] = dict.fromkeys(names)
    # All signs of life count for all: a node may have several shards, and writes one after the other.
    since, pause = clock(), _SHORTEST_LOOK_S
    while len(found) < len(names):
        for name in names:
            if name in found:
                continue
            note = transaction.read_note(parts_name(name))
            if note == last[name] or note is None:
                continue
            last[name], since = note, clock()
            parts = _read(note, name)
            if parts is not None:
                found[name] = (parts, note)
                pause = _SHORTEST_LOOK_S
        if len(found) < len(names):
            if clock() - since > (PATIENCE_S if is_current() else LAST_PATIENCE_S):
                raise CommitFailed(_missing(names, found, last, clock() - since))
            sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_S)
    entries = []
    for name, (parts, note) in found.items():
        entries.append(FileEntry(name, parts.nbytes, parts.digest))
        entries.append(FileEntry(parts_name(name), len(note), digest_buffer(note)))
    return entries


def _missing(names: Sequence[str], found: Collection[str], notes: Mapping[str, bytes | None], seconds: float) -> str:
    """Return why a save is given up."""
    lacking = next(name for name in names if name not in found)
    if not any(notes.values()):
        # Most likely a directory that each node has for itself.
        return (
            f"{lacking} was not written: no other node has written anything here for {seconds:.0f} s. Do all nodes "
            "reach this location (a shared volume, or object storage)? State that no node holds whole needs one"
        )
    return f"{lacking} was not written: its node has given no sign of life for {seconds:.0f} s"


def _read(note: bytes, name: str) -> ShardParts | None:
    """Return what a note says of a shard; None while it is being written.

    Raises:
        CommitFailed: It could not be written.
    """
    try:
        document = json.loads(note)
        if isinstance(document, Mapping) and "alive" in document:
            return None
        if isinstance(document, Mapping) and "error" in document:
            raise CommitFailed(f"another node could not write {name}: {document['error']}")
        return ShardParts.from_json(note)
    except ValueError as error:
        raise CommitFailed(f"what another node says of {name} cannot be read: {error}") from None
