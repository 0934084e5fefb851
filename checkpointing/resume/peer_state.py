"""State for nodes that have none: ranks of nodes that hold a snapshot send it through the process group.

No port and no protocol are added. Each holder has verified what it sends, and the receiver verifies what has arrived by
the digests that were recorded when the snapshot was made. Several holders send disjoint parts; one rank of each node
receives them, into memory that the other ranks of the node map.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpointing.agent.client import OfferedSnapshot
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.host.shared_memory import SharedMemory, place_on_pages
from checkpointing.process.ranks import Ranks

# Bytes that are sent at a time: enough for the wire, few enough that several holders share a file.
_PART_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Offer:
    """What a rank can resume from.

    Attributes:
        node: The first rank of its node.
        attempts: Steps of the snapshots that its node holds, with the attempt that computed each.
    """

    node: int
    attempts: Mapping[int, int]


@dataclass(frozen=True)
class Held:
    """A snapshot in the memory of some nodes.

    Attributes:
        attempt: The attempt that computed it.
        nodes: The first rank of each node that holds it.
        is_everywhere: Whether these are all nodes.
    """

    attempt: int
    nodes: tuple[int, ...]
    is_everywhere: bool


def held_by_nodes(offers: Sequence[Offer], newest: int = 0) -> dict[int, Held]:
    """Find the snapshots that may be resumed from; pure, and equal on all ranks.

    The same step of another attempt belongs to another line of history. A snapshot that not all nodes hold counts only
    if no node holds one of a newer attempt: a node that was cut off must not bring an abandoned line back.

    Args:
        offers: Of all ranks, by rank.
        newest: The newest attempt of which a node holds anything else.

    Returns:
        By step.
    """
    nodes = sorted({offer.node for offer in offers})
    newest = max([newest, *(attempt for offer in offers for attempt in offer.attempts.values())])
    found = {}
    for step in {step for offer in offers for step in offer.attempts}:
        attempt = max(offer.attempts[step] for offer in offers if step in offer.attempts)
        lacking = {offer.node for offer in offers if offer.attempts.get(step) != attempt}
        holders = tuple(node for node in nodes if node not in lacking)
        if holders and (not lacking or attempt == newest):
            found[step] = Held(attempt, holders, not lacking)
    return found


@dataclass(frozen=True)
class _Description:
    """A snapshot without its bytes: what it is of, and each file's name, size and digest."""

    info: SnapshotInfo
    files: tuple[tuple[str, int, str], ...]

    @classmethod
    def of(cls, snapshot: OfferedSnapshot) -> _Description:
        files = snapshot.files.items()
        return cls(snapshot.info, tuple((name, view.nbytes, snapshot.digests[name]) for name, view in files))


class NoMemory(Exception):
    """A node has no memory for what it would receive; raised on all ranks.

    Attributes:
        rank: Of the node.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} has no memory for the state of the other nodes: {reason}")
        self.rank = rank


class PeerState:
    """Passes one snapshot on to the nodes that do not hold it; all ranks make the same calls."""

    def __init__(self, ranks: Ranks, held: Held, snapshot: OfferedSnapshot | None) -> None:
        """Agree on what is passed on.

        Args:
            ranks: This rank, with a group that this thread uses.
            held: Who holds the snapshot.
            snapshot: The snapshot, on the ranks of these nodes.
        """
        self._ranks, self._held, self._snapshot = ranks, held, snapshot
        self._node = ranks.rank - ranks.local_rank
        everyone = ranks.gather(
            (self._node, _Description.of(snapshot) if snapshot is not None and self._leads else None)
        )
        self._receivers = sorted({node for node, _ in everyone} - set(held.nodes))
        described = {node: found for node, found in everyone if found is not None}
        # Small files may say how long something took on their node. What differs comes from the first holder alone.
        self._description = described[held.nodes[0]]
        self._equal = {
            file for file in self._description.files if all(file in found.files for found in described.values())
        }
        self._memory: SharedMemory | None = None

    @property
    def _leads(self) -> bool:
        return self._ranks.local_rank == 0

    def receive(self) -> OfferedSnapshot | None:
        """Send this node's parts, or receive all.

        Returns:
            What was received, which is not verified yet; None on a node that holds it.

        Raises:
            NoMemory: A node has none for it.
        """
        ranks, description = self._ranks, self._description
        reason = ""
        offsets, end = place_on_pages(nbytes for _, nbytes, _ in description.files)
        lacks = self._node in self._receivers
        if lacks and self._leads:
            try:
                self._memory = SharedMemory.create("checkpoint-received", end)
            except OSError as error:
                reason = error.strerror or str(error)
        # Nobody sends before everybody can receive.
        refused = next(((rank, why) for rank, why in enumerate(ranks.gather(reason)) if why), None)
        if refused is not None:
            raise NoMemory(*refused)
        outgoing, incoming, tag = [], [], 0
        for (name, nbytes, digest), place in zip(description.files, offsets, strict=True):
            for start in range(0, nbytes, _PART_BYTES):
                stop = min(start + _PART_BYTES, nbytes)
                # In turn, so that all holders send about as much.
                holders = self._held.nodes if (name, nbytes, digest) in self._equal else self._held.nodes[:1]
                sender = holders[tag % len(holders)]
                if sender == ranks.rank:
                    assert self._snapshot is not None
                    part = self._snapshot.files[name][start:stop]
                    outgoing += [(part, node, tag) for node in self._receivers]
                elif self._memory is not None:
                    incoming.append((self._memory.buffer[place + start : place + stop], sender, tag))
                tag += 1
        ranks.transfer(outgoing, incoming)
        # Other processes of the same user may open a descriptor there.
        path = f"/proc/{os.getpid()}/fd/{self._memory.fd}" if self._memory is not None else ""
        paths = ranks.gather(path)
        if lacks and self._memory is None:
            self._memory = SharedMemory.attach(os.open(paths[self._node], os.O_RDWR | os.O_CLOEXEC))
        ranks.barrier()
        if self._memory is None:
            return None
        files = {
            name: self._memory.buffer[place : place + nbytes]
            for (name, nbytes, _), place in zip(description.files, offsets, strict=True)
        }
        digests = {name: digest for name, _, digest in description.files}
        # All ranks have mapped it, so it lives as long as these views of it.
        self._memory.close()
        return OfferedSnapshot(description.info, files, digests)
