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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.commit.protocol import CommitSteps, StagedFile
from checkpointing.commit.save_notes import OtherNodeFailed, SignsOfLife, await_note, await_reports, is_committed
from checkpointing.format.digest import PART_BYTES, num_parts
from checkpointing.format.manifest import FileEntry, SnapshotInfo
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
    save: ReplicatedSave,
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
        save: Which parts.
        files: The files.
        is_wanted: Asked while the other node is waited for, and between files; False ends it.
        clock: Seconds.
        sleep: Waits.

    Returns:
        Whether this node has seen the save: otherwise the place may not be one that both nodes reach.

    Raises:
        OSError: Storage refused; the node that commits learns of it if that can be written.
    """
    files = [file for file in files if save.portion(len(file.data))]
    if not files:
        return True
    transaction = storage.begin(info.step, info.attempt, save.identity, joins=True)

    def may_begin() -> bool:
        # Where the node that commits writes alone, it may be done before this one has looked.
        return is_wanted() and not is_committed(storage, info)

    begun = await_note(transaction, _BEGUN, BEGIN_PATIENCE_S, clock, sleep, may_begin)
    if begun is None:
        return is_committed(storage, info) or not is_wanted()
    tokens: dict[str, str] = json.loads(begun)["files"]
    if not tokens:
        return True
    note, report = _note_of(save.node), {}
    signs = SignsOfLife(transaction, note)
    try:
        for file in files:
            if not is_wanted():
                raise OSError(errno.ECANCELED, "its attempt is over")
            numbers = save.portion(len(file.data))
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


class ReplicatedCommit(CommitSteps):
    """The part of the node that commits."""

    def __init__(
        self,
        save: ReplicatedSave,
        files: Sequence[HeldFile],
        *,
        is_current: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Describe a save; nothing is written yet.

        Args:
            save: Which of the nodes this one is.
            files: The files; none where this node writes alone, which the others then learn.
            is_current: Whether the attempt that made the snapshot runs still; otherwise the others get less time.
            clock: Seconds.
            sleep: Waits.
        """
        self._save, self._is_current = save, is_current
        self._files = {file.name: file for file in files}
        self._clock, self._sleep = clock, sleep
        self._tokens: dict[str, str] = {}
        self._receipts: dict[str, list[Any]] = {}
        self._began = 0.0

    @property
    def others_bytes(self) -> int:
        """How much of the files other nodes write, in bytes."""
        sizes = [len(file.data) for file in self._files.values()]
        return sum(sizes) - sum(len(file.part(self._save.portion(len(file.data)))) for file in self._files.values())

    @property
    def nodes_that_write(self) -> int:
        """Number of nodes that have written the checkpoint."""
        return len(self._others()) + 1 if self._files and self.gave_up is None else 1

    def _others(self) -> set[int]:
        """Return the other nodes that have parts to write."""
        sizes = [len(file.data) for file in self._files.values()]
        return {
            node
            for node in range(self._save.nodes)
            if node != self._save.node and any(self._save.portion(nbytes, node) for nbytes in sizes)
        }

    def begin(self, storage: Storage, info: SnapshotInfo) -> Transaction:
        """Open the files, and let the other nodes write."""
        transaction = storage.begin(info.step, info.attempt, self._save.identity)
        self._began = self._clock()
        try:
            self._open(transaction)
        except BaseException:
            transaction.abort()
            raise
        return transaction

    def _open(self, transaction: Transaction) -> None:
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

    def write(self, transaction: Transaction, staged: StagedFile) -> int:
        """Write this node's parts of a file, or all of a small one. What fails is tried again alone."""
        name = staged.name
        if name not in self._files:
            return super().write(transaction, staged)
        file = self._files[name]
        numbers = self._save.portion(len(file.data))
        self._receipts[name] = []
        if numbers and self.gave_up is None:
            token, data = self._tokens[name], file.part(numbers)
            try:
                self._receipts[name] = transaction.write_parts(name, token, numbers.start, data)
            except OSError as error:
                self._give_up(f"parts of {name} could not be written: {error.strerror or error}")
        failpoint("split.written")
        return len(file.data)

    def complete(self, transaction: Transaction, own: Callable[[], list[FileEntry]]) -> list[FileEntry]:
        """Wait for the other nodes, and complete the files; write them alone where a node has failed."""
        reports = {self._save.node: self._receipts}
        if self.gave_up is None:
            self._await_reports(transaction, reports)
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
        transaction.withdraw([_note_of(node) for node in range(self._save.nodes)])
        return own()

    def _await_reports(self, transaction: Transaction, reports: dict[int, dict[str, list[Any]]]) -> None:
        """Wait for the receipts of each other node, by file, or give up."""
        nodes = {_note_of(node): node for node in sorted(self._others())}
        longest_s = min(max(_TIMES * (self._clock() - self._began), _LEAST_WAIT_S), _LONGEST_WAIT_S)

        def look(names: list[str]) -> Iterator[tuple[bytes | None, bytes | None]]:
            for note in map(transaction.read_note, names):
                is_report = note is not None and "files" in json.loads(note)
                yield (note, None) if is_report else (None, note)

        def take(name: str, note: bytes) -> None:
            report = json.loads(note)["files"]
            if problem := self._problem(nodes[name], report):
                self._give_up(problem)
                raise OtherNodeFailed(name, problem)
            reports[nodes[name]] = {file: entry["receipts"] for file, entry in report.items()}

        def limits() -> tuple[float, float]:
            return PATIENCE_S if self._is_current() else PATIENCE_S / 2, longest_s

        try:
            await_reports(list(nodes), look, take, limits, clock=self._clock, sleep=self._sleep)
        except OtherNodeFailed as failed:
            if failed.error is None:
                self._give_up(f"another node has not written its part for {failed.waited_s:.0f} s")
            self._give_up(f"another node could not write its part: {failed.error}")

    def _problem(self, node: int, report: dict[str, Any]) -> str | None:
        """Return what is wrong with a node's report: it lacks a file, or the bytes are not those of this node."""
        for name, file in self._files.items():
            numbers = self._save.portion(len(file.data), node)
            expected = b"".join(file.parts().digests[numbers.start : numbers.stop]).hex()
            if numbers and report.get(name, {}).get("digests") != expected:
                return (
                    f"another node holds other bytes of {name}: the replicas are not equal, or the memory of a machine "
                    "is damaged (runner doctor)"
                )
        return None
