"""A checkpoint that every node holds whole, and whose large files all nodes write: each some of the parts.

One node's link to the storage would otherwise carry everything, while the others hold the same bytes. The node that
commits opens each large file (an upload in parts, or a file under a name of its own), says so in a note, and writes its
parts and all small files. The others write theirs, and report in a note each, once, what the storage answered and the
digests of what they wrote. These are compared with the memory of the node that commits, which then completes the files
and commits as it does alone.

A node that gives no sign of life, or cannot write, costs time only: what was opened is dropped, so that nothing it may
still write can get into the checkpoint, and the node that commits writes these files by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.digest import PART_BYTES, num_parts
from checkpointing.errors import CommitFailed, InvalidCheckpoint
from checkpointing.failpoints import failpoint
from checkpointing.manifest import SnapshotInfo
from checkpointing.save_notes import LONGEST_LOOK_S, SHORTEST_LOOK_S, SignsOfLife, await_note, error_in
from checkpointing.shards import ShardParts
from checkpointing.storage import Storage
from checkpointing.storage.base import Transaction

# Smaller files are written by the node that commits: nodes wait for each other for up to half a second.
LEAST_BYTES = 4 * PART_BYTES
# S3 takes no more: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MOST_PARTS = 10_000
# Without a sign of life from a node, for so long, its parts are written by the node that commits.
PATIENCE_S = 8.0
# For the node that commits to begin: it may have to finish an earlier save first.
BEGIN_PATIENCE_S = 20.0
# For a node that lives, but does not get on; when its attempt is over, ranks wait for this.
LONGEST_S, LAST_LONGEST_S = 3600.0, 60.0
_BEGUN = ".split.json"


@dataclass(frozen=True)
class Split:
    """Which of the nodes of a save this one is.

    Attributes:
        identity: Of the save, in hexadecimal digits; all nodes have the same.
        node: Number of this node among those that write.
        nodes: Number of nodes that write.
    """

    identity: str
    node: int
    nodes: int

    def portion(self, nbytes: int, node: int | None = None) -> range:
        """Return the numbers of the parts of a file of `nbytes` bytes that a node, by default this one, writes."""
        number, total = self.node if node is None else node, num_parts(nbytes)
        return range(total * number // self.nodes, total * (number + 1) // self.nodes)


@dataclass(frozen=True)
class WholeFile:
    """A file in memory.

    Attributes:
        name: Its name inside the checkpoint.
        data: Its bytes.
        parts: Returns the digests of its parts, once they are known.
    """

    name: str
    data: memoryview
    parts: Callable[[], ShardParts]

    def part(self, numbers: range) -> memoryview:
        """Return the bytes of consecutive parts."""
        return self.data[numbers.start * PART_BYTES : numbers.stop * PART_BYTES]


def is_split(nbytes: int) -> bool:
    """Return whether several nodes write a file of `nbytes` bytes: neither a small one, nor one of too many parts."""
    return LEAST_BYTES <= nbytes <= MOST_PARTS * PART_BYTES


def _note_of(node: int) -> str:
    return f".split.{node}.json"


def write_portion(
    storage: Storage,
    info: SnapshotInfo,
    split: Split,
    files: Sequence[WholeFile],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Write the parts of a node that does not commit.

    Args:
        storage: Where to.
        info: What the files are of.
        split: Which parts.
        files: The large files.
        clock: Seconds.
        sleep: Waits.

    Returns:
        Whether this node has seen the save: otherwise the place may not be one that both nodes reach.

    Raises:
        OSError: Storage refused; the node that commits learns of it if that can be written.
    """
    transaction = storage.begin(info.step, info.attempt, split.identity, joins=True)
    begun = transaction.read_note(_BEGUN)
    if begun is None:
        if _is_committed(storage, info):
            return True
        begun = await_note(transaction, _BEGUN, BEGIN_PATIENCE_S, clock, sleep)
    if begun is None:
        return _is_committed(storage, info)
    tokens: dict[str, str] = json.loads(begun)["files"]
    if not tokens:
        return True
    note, report = _note_of(split.node), {}
    signs = SignsOfLife(transaction, note)
    try:
        for file in files:
            numbers = split.portion(len(file.data))
            if file.name not in tokens or not numbers:
                continue
            receipts = transaction.write_parts(file.name, tokens[file.name], numbers.start, file.part(numbers))
            failpoint("portion.written")
            digests = b"".join(file.parts().digests[numbers.start : numbers.stop]).hex()
            report[file.name] = {"receipts": receipts, "digests": digests}
    except OSError as error:
        signs.end(error.strerror or str(error))
        raise
    finally:
        signs.end()
    transaction.write_note(note, json.dumps({"files": report}).encode())
    failpoint("portion.reported")
    return True


def _is_committed(storage: Storage, info: SnapshotInfo) -> bool:
    """Return whether the save is over: this node has come too late."""
    try:
        return storage.read_manifest(info.step).attempt == info.attempt
    except InvalidCheckpoint:
        return False


class SplitSave:
    """The part of the node that commits.

    Attributes:
        split: Which of the nodes it is.
        gave_up: Why it had to write alone; None where all nodes have written.
        met_others: Whether any other node has given a sign of life.
    """

    def __init__(
        self,
        split: Split,
        files: Sequence[WholeFile],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Describe a save; nothing is written yet.

        Args:
            split: Which of the nodes this one is.
            files: The large files; none where this node writes alone, which the others then learn.
            clock: Seconds.
            sleep: Waits.
        """
        self.split = split
        self.gave_up: str | None = None
        self.met_others = False
        self._files = {file.name: file for file in files}
        self._clock, self._sleep = clock, sleep
        self._tokens: dict[str, str] = {}
        self._receipts: dict[str, list[Any]] = {}
        self._transaction: Transaction | None = None

    @property
    def nodes_that_write(self) -> int:
        """Number of nodes that have written the checkpoint."""
        return self.split.nodes if self._files and self.gave_up is None else 1

    def begin(self, transaction: Transaction) -> None:
        """Open the files, and let the other nodes write.

        Raises:
            OSError: Storage refused.
        """
        self._transaction = transaction
        for name, file in self._files.items():
            self._tokens[name] = transaction.open_split(name, len(file.data))
        transaction.write_note(_BEGUN, json.dumps({"files": self._tokens}).encode())

    def holds(self, name: str) -> bool:
        """Return whether a file is one that several nodes write."""
        return name in self._files

    def write(self, name: str) -> int:
        """Write this node's parts of a file; return the size of the whole file.

        Raises:
            OSError: Storage refused.
        """
        assert self._transaction is not None
        file = self._files[name]
        numbers = self.split.portion(len(file.data))
        self._receipts[name] = (
            self._transaction.write_parts(name, self._tokens[name], numbers.start, file.part(numbers))
            if numbers
            else []
        )
        failpoint("split.written")
        return len(file.data)

    def complete(self, is_current: Callable[[], bool] = lambda: True) -> None:
        """Wait for the other nodes, and complete the files; write them alone where a node has failed.

        Args:
            is_current: Whether the attempt that made the snapshot runs still.

        Raises:
            CommitFailed: Another node holds other bytes.
            OSError: Storage refused.
        """
        transaction = self._transaction
        assert transaction is not None
        reports = self._await_reports(transaction, is_current)
        for name, file in self._files.items():
            if reports is None:
                transaction.drop_split(name, self._tokens[name])
                transaction.write(name, [file.data])
                continue
            receipts: list[Any] = []
            for node in range(self.split.nodes):
                receipts += self._receipts[name] if node == self.split.node else reports[node].get(name, [])
            transaction.close_split(name, self._tokens[name], len(file.data), receipts)
            failpoint("split.closed")
        transaction.withdraw([_BEGUN, *map(_note_of, range(self.split.nodes))])

    def _await_reports(
        self, transaction: Transaction, is_current: Callable[[], bool]
    ) -> dict[int, dict[str, list[Any]]] | None:
        """Return the receipts of each other node, by file; None where one has failed."""
        missing = {
            node
            for node in range(self.split.nodes)
            if node != self.split.node and any(self.split.portion(len(f.data), node) for f in self._files.values())
        }
        reports: dict[int, dict[str, list[Any]]] = {node: {} for node in range(self.split.nodes)}
        seen: dict[int, bytes] = {}
        began = since = self._clock()
        pause = SHORTEST_LOOK_S
        while missing:
            for node in sorted(missing):
                note = transaction.read_note(_note_of(node))
                if note is None or note == seen.get(node):
                    continue
                seen[node], since, self.met_others = note, self._clock(), True
                error = error_in(note)
                if error is not None:
                    self.gave_up = f"another node could not write its part: {error}"
                    return None
                report = json.loads(note).get("files")
                if report is not None:
                    reports[node] = {name: self._checked(name, node, entry) for name, entry in report.items()}
                    missing.discard(node)
                    pause = SHORTEST_LOOK_S
            if not missing:
                break
            silent_s, waited_s = self._clock() - since, self._clock() - began
            patience_s, longest_s = (PATIENCE_S, LONGEST_S) if is_current() else (PATIENCE_S / 2, LAST_LONGEST_S)
            if silent_s > patience_s or waited_s > longest_s:
                self.gave_up = f"another node has not written its part for {waited_s:.0f} s"
                return None
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_S)
        return reports

    def _checked(self, name: str, node: int, entry: dict[str, Any]) -> list[Any]:
        """Return a node's receipts for a file, once its digests are found to be those of this node.

        Raises:
            CommitFailed: They are not.
        """
        file = self._files[name]
        numbers = self.split.portion(len(file.data), node)
        if bytes.fromhex(entry["digests"]) != b"".join(file.parts().digests[numbers.start : numbers.stop]):
            raise CommitFailed(
                f"another node of this run holds other bytes of {name}: the memory of one of the two machines is not "
                "what was trained. Look for memory errors (runner doctor, the system's log)"
            )
        return list(entry["receipts"])
