"""Which nodes take part in the next attempt of an elastic run. Pure: what is known goes in, a decision comes out."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from runner.config.schema import LaunchConfig
from runner.errors import UsageError
from runner.session.preflight import check_shares
from runner.session.step_samples import StepSamples

# A node of the last attempt that is still connected has its processes ready within this time, or counts as lost.
_RETURN_S = 30.0
# A node that has lost its leader looks for the next one every second.
_FOLLOW_S = 5.0


@dataclass(frozen=True)
class Limits:
    """How many nodes a run may have.

    Attributes:
        min_nodes: Fewer do not train.
        max_nodes: More are spares.
        last_call_s: Seconds that the first attempt waits for further nodes once there are enough.
        grow_interval_s: Seconds from one change to the admission of further nodes.
        samples: Samples of a step; None if the ranks need not share them equally, or nobody knows yet.
        local_ranks: Ranks on each node.
        uneven: Whether some ranks may have fewer samples than others.
        parts: What `samples` counts: samples, or virtual ranks.
        model_ranks: Ranks that compute the same samples together.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float = 0.0
    grow_interval_s: float = 0.0
    samples: int | None = None
    local_ranks: int = 1
    uneven: bool = False
    parts: str = "samples"
    model_ranks: int = 1

    @classmethod
    def of(cls, launch: LaunchConfig, shape: tuple[int, int], samples: StepSamples) -> Limits:
        """Return the limits of a configuration.

        Args:
            launch: The configuration.
            shape: Number of nodes, and of ranks on each.
            samples: Knows how many samples a step has.
        """
        num_nodes, local_ranks = shape
        smallest = min(launch.min_nodes or num_nodes, num_nodes)
        return cls(
            smallest,
            num_nodes,
            launch.last_call_s,
            launch.grow_interval_s,
            samples.number(num_nodes * local_ranks),
            local_ranks,
            uneven=samples.may_be_uneven,
            parts=samples.parts,
            model_ranks=samples.model_ranks,
        )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes

    def check(self) -> None:
        """Check that some number of nodes can share the samples of a step.

        Raises:
            UsageError: None can; the text says how many ranks can.
        """
        if self.samples is not None and self.fitting(self.max_nodes) is None:
            if self.uneven:
                ranks, most = self.max_nodes * self.local_ranks, self.samples * self.model_ranks
                raise UsageError(
                    f"a step of this run has {self.samples} {self.parts}, which {ranks} ranks cannot share; start at "
                    f"most {most} ranks in all (--nproc-per-node, --nnodes)"
                )
            check_shares(self.samples, self.max_nodes * self.local_ranks, self.model_ranks)

    def fitting(self, available: int) -> int | None:
        """Return the largest number of nodes that can share a step's samples; None if there is none.

        Args:
            available: Number of nodes that there are.
        """
        for number in range(min(available, self.max_nodes), self.min_nodes - 1, -1):
            sharing, rest = divmod(number * self.local_ranks, self.model_ranks)
            if rest:
                continue
            if self.samples is None or self.samples % sharing == 0 or (self.uneven and self.samples > sharing):
                return number
        return None

    def missing(self, ready: AbstractSet[int]) -> list[int]:
        """Return the lowest node ranks that are absent, as many as there are nodes missing.

        Args:
            ready: Node ranks of the nodes that there are; spares may have ranks above `max_nodes`.
        """
        absent = sorted(set(range(self.max_nodes)) - ready)
        return absent[: max(self.max_nodes - len(ready), 0)]

    def chosen(self, available: AbstractSet[int], members: AbstractSet[int], leader: int) -> frozenset[int] | None:
        """Choose the nodes that train; None if there are not enough.

        Args:
            available: Node ranks of the nodes that there are.
            members: Those of the newest attempt, which hold its state and come first. Then the lowest ones do.
            leader: Node rank of the leader, which always takes part.
        """
        number = self.fitting(len(available))
        if number is None:
            return None
        ordered = sorted(available, key=lambda node: (node != leader, node not in members, node))
        return frozenset(ordered[:number])


@dataclass(frozen=True)
class Seen:
    """What the leader knows of the nodes.

    Attributes:
        ready: Node ranks of those whose processes are up, the leader's included.
        coming: Those that are connected, while their processes start or end.
        members: Those of the newest attempt; empty before the first one of this session.
        leader: Node rank of the leader.
        expected: Those that followed the leader before this one; they look for the new one.
    """

    ready: frozenset[int]
    coming: frozenset[int] = frozenset()
    members: frozenset[int] = frozenset()
    leader: int = 0
    expected: frozenset[int] = frozenset()


def admit(limits: Limits, seen: Seen, *, enough_s: float = 0.0) -> frozenset[int] | None:
    """Decide whether an attempt begins now, and on which nodes.

    A run that has lost nodes continues at once on those that are left; one that has lost its leader, when they have
    found the next. Only its first attempt waits for more than it needs, as torchrun's rendezvous does with its last
    call.

    Args:
        limits: Of the run.
        seen: The nodes.
        enough_s: Seconds for which enough nodes have been ready.

    Returns:
        The node ranks; None to wait.
    """
    chosen = limits.chosen(seen.ready, seen.members, seen.leader)
    if chosen is None or len(chosen) == limits.fitting(limits.max_nodes):
        return chosen
    if not seen.members:
        if seen.expected and (seen.expected <= seen.ready or enough_s >= _FOLLOW_S):
            return chosen
        return chosen if enough_s >= limits.last_call_s else None
    # These have the newest snapshot and are about to be ready.
    returning = seen.coming & seen.members
    better = limits.fitting(len(seen.ready | returning))
    if better is not None and better > len(chosen) and enough_s < _RETURN_S:
        return None
    return chosen


def change(
    limits: Limits, seen: Seen, *, leaving: AbstractSet[int] = frozenset(), since_change_s: float = 0.0
) -> frozenset[int] | None:
    """Decide whether a running attempt ends at a step boundary, so that the next one has other nodes.

    Args:
        limits: Of the run.
        seen: The nodes; `members` are those of the running attempt.
        leaving: Nodes that were asked to stop, and have said so.
        since_change_s: Seconds since the nodes changed last.

    Returns:
        The node ranks of the next attempt; None to go on.
    """
    left = limits.chosen((seen.ready | seen.members) - leaving, seen.members, seen.leader)
    if seen.members & leaving:
        return left
    if left is None or len(left) <= len(seen.members) or since_change_s < limits.grow_interval_s:
        return None
    return left
