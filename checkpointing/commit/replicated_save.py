"""A checkpoint that every node holds whole, and whose large files all nodes write: each some of the parts.

One node's link to the storage would otherwise carry everything, while the others hold the same bytes. The node that
commits opens each large file (an upload in parts, or a file under a name of its own), says so in a note, and writes its
parts and all small files. The others write theirs, and report in a note each, once, what the storage answered and the
digests of what they wrote. These are compared with the memory of the node that commits, which then completes the files
and commits as it does alone.

A node that gives no sign of life, cannot write, or holds other bytes costs time only: what was opened is dropped, so
that nothing it may still write can get into the checkpoint, and the node that commits writes these files by itself.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.commit.save_notes import (
    LONGEST_LOOK_S,
    SHORTEST_LOOK_S,
    SignsOfLife,
    await_note,
    error_in,
    is_committed,
)
from checkpointing.format.digest import PART_BYTES, num_parts
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import HeldFile
from checkpointing.host.failpoints import failpoint
from checkpointing.storage import Storage
from checkpointing.storage.base import Transaction

# Smaller files are written by the node that commits: nodes wait for each other for up to half a second.
LEAST_BYTES = 4 * PART_BYTES
# S3 takes no more: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MOST_PARTS = 10_000
# Without a sign of life from a node, for so long, its parts are written by the node that commits.
PATIENCE_S = 8.0
# A node that lives is waited for as many times as long as this node's own parts took, and at least and at most for
# this: an agent without progress is given up after ten minutes.
_TIMES, _LEAST_WAIT_S, _LONGEST_WAIT_S = 3.0, 30.0, 300.0
# For the node that commits to begin: it may have to finish an earlier save first.
BEGIN_PATIENCE_S = 20.0
_BEGUN = ".split.json"


@dataclass(frozen=True)
class ReplicatedSave:
    """Which of the nodes of a save this one is.

    Attributes:
        identity: Of the save, in hexadecimal digits; all nodes have the same.
        node: Number of this node among those that write.
        nodes: Number of nodes that write.
        files: The files that they write together: large, and equal on all of them.
    """

    identity: str
    node: int
    nodes: int
    files: tuple[str, ...]

    @classmethod
    def between(
        cls, ranks: Sequence[tuple[int, bool]], own: int, identity: str, files: tuple[str, ...]
    ) -> ReplicatedSave | None:
        """Divide a save among the nodes that hold the snapshot.

        Args:
            ranks: Of each rank, its node, and whether that has memory for the snapshot. The first one's node commits.
            own: This node.
            identity: Of the save.
            files: What they can write together.

        Returns:
            This node's share; None where it has none, or no more than one node writes. Without the node that commits
            there is nobody whom the others could wait for.
        """
        without = {node for node, holds in ranks if not holds}
        nodes = sorted({node for node, _ in ranks} - without)
        if len(nodes) < 2 or own not in nodes or ranks[0][0] in without:
            return None
        return cls(identity, nodes.index(own), len(nodes), files)

    def portion(self, nbytes: int, node: int | None = None) -> range:
        """Return the numbers of the parts of a file of `nbytes` bytes that a node, by default this one, writes."""
        number, total = self.node if node is None else node, num_parts(nbytes)
        return range(total * number // self.nodes, total * (number + 1) // self.nodes)


def is_split(nbytes: int) -> bool:
    """Return whether several nodes write a file of `nbytes` bytes: neither a small one, nor one of too many parts."""
    return LEAST_BYTES <= nbytes <= MOST_PARTS * PART_BYTES


def _note_of(node: int) -> str:
    return f".split.{node}.json"


def write_portion(
    storage: Storage,
    info: SnapshotInfo,
    split: ReplicatedSave,
    files: Sequence[HeldFile],
    is_wanted: Callable[[], bool] = lambda: True,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Write the parts of a node that does not commit.

    Args:
        storage: Where to.
        info: What the files are of.
        split: Which parts.
        files: The files.
        is_wanted: Asked while the other node is waited for, and between files; False ends it.
        clock: Seconds.
        sleep: Waits.

    Returns:
        Whether this node has seen the save: otherwise the place may not be one that both nodes reach.

    Raises:
        OSError: Storage refused; the node that commits learns of it if that can be written.
    """
    files = [file for file in files if split.portion(len(file.data))]
    if not files:
        return True
    transaction = storage.begin(info.step, info.attempt, split.identity, joins=True)
    begun = transaction.read_note(_BEGUN)
    if begun is None:
        if is_committed(storage, info):
            return True
        begun = await_note(transaction, _BEGUN, BEGIN_PATIENCE_S, clock, sleep, is_wanted)
    if begun is None:
        return is_committed(storage, info) or not is_wanted()
    tokens: dict[str, str] = json.loads(begun)["files"]
    if not tokens:
        return True
    note, report = _note_of(split.node), {}
    signs = SignsOfLife(transaction, note)
    try:
        for file in files:
            if not is_wanted():
                raise OSError(errno.ECANCELED, "its attempt is over")
            numbers = split.portion(len(file.data))
            receipts = transaction.write_parts(file.name, tokens[file.name], numbers.start, file.part(numbers))
            failpoint("portion.written")
            digests = b"".join(file.parts().digests[numbers.start : numbers.stop]).hex()
            report[file.name] = {"receipts": receipts, "digests": digests}
        signs.end()
        transaction.write_note(note, json.dumps({"files": report}).encode())
    except OSError as error:
        signs.end(error.strerror or str(error))
        raise
    finally:
        signs.end()
        if transaction.read_note(_BEGUN) is None:
            # The node that commits has gone on without this one, and removes no more notes.
            transaction.withdraw([note])
    failpoint("portion.reported")
    return True


class SplitSave:
    """The part of the node that commits.

    Attributes:
        split: Which of the nodes it is.
        gave_up: Why it had to write alone; None where all nodes have written.
    """

    def __init__(
        self,
        split: ReplicatedSave,
        files: Sequence[HeldFile],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Describe a save; nothing is written yet.

        Args:
            split: Which of the nodes this one is.
            files: The files; none where this node writes alone, which the others then learn.
            clock: Seconds.
            sleep: Waits.
        """
        self.split = split
        self.gave_up: str | None = None
        self._files = {file.name: file for file in files}
        self._clock, self._sleep = clock, sleep
        self._tokens: dict[str, str] = {}
        self._receipts: dict[str, list[Any]] = {}
        self._transaction: Transaction | None = None
        self._began = 0.0

    @property
    def nodes_that_write(self) -> int:
        """Number of nodes that have written the checkpoint."""
        return len(self._others()) + 1 if self._files and self.gave_up is None else 1

    def _others(self) -> set[int]:
        """Return the other nodes that have parts to write."""
        sizes = [len(file.data) for file in self._files.values()]
        return {
            node
            for node in range(self.split.nodes)
            if node != self.split.node and any(self.split.portion(nbytes, node) for nbytes in sizes)
        }

    def begin(self, transaction: Transaction) -> None:
        """Open the files, and let the other nodes write.

        Raises:
            OSError: Storage refused.
        """
        self._transaction, self._began = transaction, self._clock()
        try:
            for name, file in self._files.items():
                self._tokens[name] = transaction.open_split(name, len(file.data))
        except OSError as error:
            # A place may take files only from the first byte to the last.
            self._give_up(f"a file of several nodes could not be opened: {error.strerror or error}")
        tokens = self._tokens if self.gave_up is None else {}
        transaction.write_note(_BEGUN, json.dumps({"files": tokens}).encode())

    def _give_up(self, why: str) -> None:
        self.gave_up = self.gave_up or why

    def holds(self, name: str) -> bool:
        """Return whether a file is one that several nodes write."""
        return name in self._files

    def write(self, name: str) -> int:
        """Write this node's parts of a file; return the size of the whole file. What fails is tried again alone."""
        assert self._transaction is not None
        file = self._files[name]
        numbers = self.split.portion(len(file.data))
        self._receipts[name] = []
        if numbers and self.gave_up is None:
            token, data = self._tokens[name], file.part(numbers)
            try:
                self._receipts[name] = self._transaction.write_parts(name, token, numbers.start, data)
            except OSError as error:
                self._give_up(f"parts of {name} could not be written: {error.strerror or error}")
        failpoint("split.written")
        return len(file.data)

    def complete(self, is_current: Callable[[], bool] = lambda: True) -> None:
        """Wait for the other nodes, and complete the files; write them alone where a node has failed.

        Args:
            is_current: Whether the attempt that made the snapshot runs still.

        Raises:
            OSError: Storage refused.
        """
        transaction = self._transaction
        assert transaction is not None
        reports = {self.split.node: self._receipts}
        if self.gave_up is None:
            self._await_reports(transaction, reports, is_current)
        for name, file in self._files.items():
            if self.gave_up is None:
                receipts = [one for node in sorted(reports) for one in reports[node].get(name, [])]
                try:
                    transaction.close_split(name, self._tokens[name], file.data, receipts)
                except OSError as error:
                    self._give_up(f"{name} could not be completed: {error.strerror or error}")
                failpoint("split.closed")
            if self.gave_up is not None:
                if name in self._tokens:
                    transaction.drop_split(name, self._tokens[name])
                transaction.write(name, [file.data])
        # In this order: another node that writes a note later finds that the first one is gone.
        transaction.withdraw([_BEGUN])
        transaction.withdraw([_note_of(node) for node in range(self.split.nodes)])

    def _await_reports(
        self, transaction: Transaction, reports: dict[int, dict[str, list[Any]]], is_current: Callable[[], bool]
    ) -> None:
        """Wait for the receipts of each other node, by file, or give up."""
        missing = self._others()
        seen: dict[int, bytes] = {}
        since, pause = self._clock(), SHORTEST_LOOK_S
        longest_s = min(max(_TIMES * (since - self._began), _LEAST_WAIT_S), _LONGEST_WAIT_S)
        began = since
        while missing:
            for node in sorted(missing):
                note = transaction.read_note(_note_of(node))
                if note is None or note == seen.get(node):
                    continue
                seen[node], since = note, self._clock()
                error = error_in(note)
                if error is not None:
                    self._give_up(f"another node could not write its part: {error}")
                    return
                report = json.loads(note).get("files")
                if report is not None:
                    problem = self._problem(node, report)
                    if problem is not None:
                        self._give_up(problem)
                        return
                    reports[node] = {name: entry["receipts"] for name, entry in report.items()}
                    missing.discard(node)
                    pause = SHORTEST_LOOK_S
            if not missing:
                break
            silent_s, waited_s = self._clock() - since, self._clock() - began
            if silent_s > (PATIENCE_S if is_current() else PATIENCE_S / 2) or waited_s > longest_s:
                self._give_up(f"another node has not written its part for {waited_s:.0f} s")
                return
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_S)

    def _problem(self, node: int, report: dict[str, Any]) -> str | None:
        """Return what is wrong with a node's report: it lacks a file, or the bytes are not those of this node."""
        for name, file in self._files.items():
            numbers = self.split.portion(len(file.data), node)
            expected = b"".join(file.parts().digests[numbers.start : numbers.stop]).hex()
            if numbers and report.get(name, {}).get("digests") != expected:
                return (
                    f"another node holds other bytes of {name}: the replicas are not equal, or the memory of a machine "
                    "is damaged (runner doctor)"
                )
        return None
