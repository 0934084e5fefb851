"""Changes of the nodes of an elastic run while an attempt runs: nodes that leave, and nodes that have come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from checkpointing.agent.events import SlowRanks
from runner.errors import ExitCode
from runner.journal.events import NodesChanged
from runner.node.node import Node
from runner.peers.messages import MAX_REASON, Finish
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.session.admission import Limits, Seen, change
from runner.session.session import Session


class NodeChanges:
    """Decides when an attempt is paused so that the next one has other nodes.

    Its methods are given the limits of the run and the nodes as they are seen: `members` are those of the running
    attempt, none if there is none.

    Attributes:
        leaving: Nodes that were asked to stop and without which the run goes on, with the reason.
        hands_over: Whether the leader was asked to stop, and the run goes on under another one.
    """

    def __init__(self, session: Session, send: Callable[[Finish, int], None]) -> None:
        self._session, self._send = session, send
        self.leaving: dict[int, str] = {}
        self.hands_over = False
        # Those of the leaving ones whose hardware has failed, or is slow.
        self._bad: set[int] = set()
        # Why the running attempt was paused.
        self._reason = ""
        self._changed_at = 0.0

    @property
    def evicted(self) -> dict[int, Failure]:
        """Nodes that are to leave because of their hardware, with the failure that this counts as."""
        return {
            number: Failure(FailureKind.BAD_NODE, self.leaving[number]) for number in self._bad & self.leaving.keys()
        }

    def begin(self) -> None:
        """An attempt begins."""
        self._reason = ""

    def take(self, nodes: AbstractSet[int], before: AbstractSet[int] | None) -> None:
        """Record which nodes take part in the next attempt, and did `before`; None if it is the session's first."""
        if nodes == before:
            return
        self._changed_at = self._session.monotonic()
        if before is None:
            return
        came, gone = sorted(nodes - before), sorted(before - nodes)
        self._session.record(NodesChanged(nodes=sorted(nodes), came=came, gone=gone))
        texts = [f"node {listed(who)} {what}" for who, what in ((gone, "left out"), (came, "admitted")) if who]
        self._session.display.message(f"{', '.join(texts)}: training on {len(nodes)} nodes")

    def watch(self, node: Node, limits: Limits, seen: Seen) -> None:
        """Pause the attempt of the leader's own node at a step boundary where the next one should have other nodes."""
        if self._reason or not limits.is_elastic or not node.is_training or self._session.stop:
            return
        self._evict_slow_nodes(node.checkpoints.slow, limits, seen)
        since_s = self._session.monotonic() - self._changed_at
        wanted = change(limits, seen, leaving=self.leaving.keys(), since_change_s=since_s)
        if wanted is not None:
            came = wanted - seen.members
            texts = [*self._departures(seen.members), *([f"node {listed(came)} has come"] if came else [])]
            self._reason = "; ".join(texts)
            node.pause_attempt()

    def _evict_slow_nodes(self, slow: SlowRanks | None, limits: Limits, seen: Seen) -> None:
        """Have nodes with slow ranks leave, the slowest one first, if that is wished and enough others are left.

        A rank that is slow between steps stays: its data and callbacks would be as slow on another node.
        """
        if slow is None or not self._session.config.launch.evict_slow_nodes:
            return
        found = zip(slow.ratios, slow.nodes, slow.ranks, strict=True)
        for ratio, number, rank in sorted(found, reverse=True):
            is_another = number in seen.members - {seen.leader, *self.leaving}
            if rank not in slow.between_steps and is_another and self._left_without({number}, limits, seen) is not None:
                cause = f"rank {rank} needs {ratio:.1f} times as long as the median rank (launch.evict_slow_nodes)"
                self.leaving[number] = cause
                self._bad.add(number)

    def revise(self, failure: Failure, nodes: AbstractSet[int]) -> Failure:
        """Return how an attempt of these nodes ended, for a run that continues with others; the leaving ones may go."""
        if self._session.stop:
            return failure
        reason = self._reason or "; ".join(self._departures(nodes))
        is_left_behind = failure.kind is FailureKind.BAD_NODE and bool(self._bad)
        if reason and (is_left_behind or failure.kind in (FailureKind.PREEMPTED, FailureKind.ENDED)):
            failure = replace(failure, kind=FailureKind.NODES_CHANGED, cause=reason)
        for number in sorted(self.leaving):
            self._let_go(number)
        return failure

    def on_stop(self, number: int, reason: str, limits: Limits, seen: Seen) -> None:
        """Continue without a node that was asked to stop, if enough are left; else stop the run."""
        if self._session.stop or self._left_without({number}, limits, seen) is None:
            self._session.stop.ask(f"node {number}: {reason}")
            return
        self.leaving[number] = reason
        if number not in seen.members:
            self._let_go(number)

    def on_bad(self, bad: Mapping[int, Failure], limits: Limits, seen: Seen, *, can_hand_over: bool) -> None:
        """Continue without nodes whose hardware has failed, if enough are left; else the run ends as a whole.

        If the leader is one of them, the run goes on where another node `can_hand_over`.
        """
        if not bad or self._left_without(bad.keys(), limits, seen) is None:
            return
        if seen.leader in bad:
            self.hands_over = can_hand_over
            return
        self._bad |= bad.keys()
        self.leaving.update({number: failure.cause for number, failure in bad.items()})

    def on_own_stop(self, limits: Limits, seen: Seen) -> bool:
        """Take in that the leader was asked to stop; return whether one of the nodes left leads in its place."""
        left = self._left_without({seen.leader}, limits, seen)
        self.hands_over = left is not None
        if left is not None:
            self._session.display.message(
                f"this node leaves the run to node {listed(left)}, one of which will lead; stop them too to end the run"
            )
        return self.hands_over

    def _left_without(self, gone: AbstractSet[int], limits: Limits, seen: Seen) -> AbstractSet[int] | None:
        """Return the nodes of an elastic run without these and the leaving ones; None if they are not enough."""
        left = (seen.ready | seen.members) - gone - self.leaving.keys()
        return left if limits.is_elastic and limits.fitting(len(left)) is not None else None

    def _departures(self, nodes: AbstractSet[int]) -> list[str]:
        return [f"node {number} leaves: {self.leaving[number]}" for number in sorted(nodes & self.leaving.keys())]

    def _let_go(self, number: int) -> None:
        reason = f"{self.leaving[number]}; the run continues without this node"
        code = ExitCode.BAD_NODE if number in self._bad else ExitCode.PREEMPTED
        self._send(Finish(exit_code=code.value, reason=reason[:MAX_REASON]), number)
        self._bad.discard(number)


def listed(numbers: Iterable[int]) -> str:
    """Return numbers in order, separated by commas."""
    return ", ".join(map(str, sorted(numbers)))
