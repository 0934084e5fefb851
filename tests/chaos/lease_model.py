"""Who leads a run whose leader may be lost for good, as a model: designed here before it is coded.

The node that has put the newest fence leads. It leads in epoch n if it has put the fence of n, and nobody else can: a
fence is put only where there is none. A leader goes on to n + 1 in the same way; a node that has not seen the leader's
sign of life for a while claims the number after the newest one. No clock is compared and no time-out is trusted: any
node may suspect any leader at any moment, a leader may stand still between any two steps, an answer may be lost and its
call carried out later, nodes are killed and come back, and a shared disk may lose what was not flushed.

The code (`runner/lease/lease.py`) calls these fences leases; `test_lease_conformance.py` runs it under the same
faults. There a leader goes on to the next epoch only when it was killed and is back, and begins any number of attempts
in its own; that no attempt commits after a newer one has begun is the commit protocol's (`commit_model.py`).

What must hold:

- no attempt is begun by two nodes;
- a leader that was replaced finds that out before it takes the next number from its successor;
- whatever happens, some node can lead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from chaos.commit_model import Fault


@dataclass(frozen=True)
class LeaseRules:
    """The rules that the code is to follow; a mutation breaks one of them."""

    puts_if_absent: bool = True
    reads_back: bool = True
    goes_on_from_its_own: bool = True
    flushes: bool = True


DESIGNED = LeaseRules()


class Node(NamedTuple):
    """One node.

    Attributes:
        phase: `watching`; `claiming`, `asking` and `flushing` a fence; `leading`, or `running` its attempt; `dead`.
        number: the attempt that this is about.
        life: how often it was killed.
        is_next: whether it continues from an attempt of its own, as opposed to suspecting somebody.
    """

    phase: str = "watching"
    number: int = 0
    life: int = 0
    is_next: bool = False


class Fenced(NamedTuple):
    """A fence: the node, and its life, that has put it; whether a power cut may take it."""

    node: int
    life: int
    flushed: bool


class Lease(NamedTuple):
    """A state of everything.

    Attributes:
        fences: by number, from 1; None where there is none (any more).
        late: calls without an answer that may yet arrive: number, node, life.
        begun: by number, from 1, who has begun the attempt.
    """

    nodes: tuple[Node, ...]
    fences: tuple[Fenced | None, ...]
    late: frozenset[tuple[int, int, int]]
    begun: tuple[frozenset[tuple[int, int]], ...]
    kills_left: int
    answers_to_lose: int
    cuts_left: int

    @property
    def newest(self) -> int:
        """Number of the newest fence, 0 where there is none."""
        return max((number for number, fence in enumerate(self.fences, 1) if fence is not None), default=0)


class LeaseModel:
    """Nodes that lead up to `numbers` attempts in a store that decides between two who put the same fence."""

    def __init__(
        self,
        nodes: int = 2,
        numbers: int = 3,
        *,
        kills: int = 0,
        answers_to_lose: int = 0,
        cuts: int = 0,
        disk: bool = True,
        rules: LeaseRules = DESIGNED,
    ) -> None:
        """Begin with no fence.

        Args:
            nodes: How many compete.
            numbers: How many attempts there are.
            kills: How often a node may be killed.
            answers_to_lose: How many answers may be lost.
            cuts: How often a power cut may take a fence that was not flushed.
            disk: Whether a fence must be flushed; what object storage has, it keeps.
            rules: What the nodes do.
        """
        self.rules, self.numbers = rules, numbers
        self._won = "flushing" if disk and rules.flushes else "leading"
        nobody: frozenset[tuple[int, int]] = frozenset()
        self.first = Lease(
            (Node(),) * nodes,
            (None,) * numbers,
            frozenset(),
            (nobody,) * numbers,
            kills,
            answers_to_lose,
            cuts,
        )

    def successors(self, now: Lease) -> Iterator[tuple[object, Lease]]:
        """Every next state and how it comes about.

        Raises:
            Fault: in one of them something does not hold.
        """
        for index, node in enumerate(now.nodes):
            yield from self._turn(now, index, node)
            if now.kills_left and node.phase != "dead":
                after = _with(now, index, Node("dead", life=node.life + 1))
                yield f"{index} is killed", after._replace(kills_left=now.kills_left - 1)
        for call in now.late:
            arrived = now._replace(late=now.late - {call})
            yield f"the put of {call[0]} by {call[1]} arrives", self._stored(arrived, *call) or arrived
        for number, fence in enumerate(now.fences, 1):
            if now.cuts_left and fence is not None and not fence.flushed:
                yield f"the disk loses {number}", _fenced(now, number, None)._replace(cuts_left=now.cuts_left - 1)

    def _turn(self, now: Lease, index: int, node: Node) -> Iterator[tuple[object, Lease]]:
        number, who = node.number, f"{index}: {node.phase} {node.number}"
        match node.phase:
            case "dead":
                yield f"{index} comes back", _with(now, index, Node(life=node.life))
            case "watching":
                # It suspects the leader, rightly or not.
                if now.newest < self.numbers:
                    yield f"{index} suspects", _with(now, index, Node("claiming", now.newest + 1, node.life))
            case "claiming":
                for answer, after in self._put(now, index, node):
                    yield f"{who} → {answer}", after
            case "asking":
                yield who, _with(now, index, self._asked(now, index, node))
            case "flushing":
                # It flushes, and looks whether its fence is still there.
                if self._is_mine(now, index, node):
                    after = _fenced(now, number, Fenced(index, node.life, flushed=True))
                    yield who, _with(after, index, node._replace(phase="leading"))
                else:
                    yield who, _with(now, index, Node(life=node.life))
            case "leading":
                self._check_begin(now, index, node)
                begun = now.begun[number - 1] | {(index, node.life)}
                after = now._replace(begun=(*now.begun[: number - 1], begun, *now.begun[number:]))
                yield f"{index} begins {number}", _with(after, index, node._replace(phase="running"))
            case "running":
                if now.newest > number:
                    yield f"{index} sees that it was replaced", _with(now, index, Node(life=node.life))
                following = (number if self.rules.goes_on_from_its_own else now.newest) + 1
                if following <= self.numbers:
                    yield f"{index} goes on", _with(now, index, Node("claiming", following, node.life, is_next=True))

    def _put(self, now: Lease, index: int, node: Node) -> Iterator[tuple[str, Lease]]:
        claimed = (node.number, index, node.life)
        stored = self._stored(now, *claimed)
        won = node._replace(phase=self._won)
        if stored is None:
            yield "refused", _with(now, index, Node(life=node.life))
        else:
            self._check_next(now, index, node)
            yield "stored", _with(stored, index, won)
        if now.answers_to_lose:
            unsure = node._replace(phase="asking") if self.rules.reads_back else won
            for what, after in (
                ("no answer, carried out", stored),
                ("no answer, not carried out", now),
                ("no answer, carried out later", now._replace(late=now.late | {claimed})),
            ):
                if after is not None:
                    yield what, _with(after, index, unsure)._replace(answers_to_lose=now.answers_to_lose - 1)

    def _asked(self, now: Lease, index: int, node: Node) -> Node:
        if self._is_mine(now, index, node):
            return node._replace(phase=self._won)
        if now.fences[node.number - 1] is not None:
            return Node(life=node.life)
        # The call may yet arrive: another number would leave it behind as a fence that nobody minds.
        return node._replace(phase="claiming")

    def _stored(self, now: Lease, number: int, index: int, life: int) -> Lease | None:
        """What is there once the call was carried out; None where it is refused."""
        if now.fences[number - 1] is not None and self.rules.puts_if_absent:
            return None
        return _fenced(now, number, Fenced(index, life, flushed=False))

    def _is_mine(self, now: Lease, index: int, node: Node) -> bool:
        fence = now.fences[node.number - 1]
        return fence is not None and (fence.node, fence.life) == (index, node.life)

    def _check_begin(self, now: Lease, index: int, node: Node) -> None:
        others = now.begun[node.number - 1] - {(index, node.life)}
        if others:
            raise Fault(f"{index} begins {node.number}: so has {min(others)[0]}")

    def _check_next(self, now: Lease, index: int, node: Node) -> None:
        before = now.fences[node.number - 2] if node.number > 1 else None
        if node.is_next and before is not None and (before.node, before.life) != (index, node.life):
            raise Fault(f"{index} goes on to {node.number}: {before.node} leads {node.number - 1}")


def _with(now: Lease, index: int, node: Node) -> Lease:
    return now._replace(nodes=(*now.nodes[:index], node, *now.nodes[index + 1 :]))


def _fenced(now: Lease, number: int, fence: Fenced | None) -> Lease:
    return now._replace(fences=(*now.fences[: number - 1], fence, *now.fences[number:]))


def without_a_way_out(model: LeaseModel) -> list[Lease]:
    """States from which no state can be reached in which a live node runs the newest attempt.

    A run has no last attempt, but the model does: a state that has reached it counts as good.
    """
    came: dict[Lease, list[Lease]] = {model.first: []}
    queue = deque([model.first])
    while queue:
        now = queue.popleft()
        for _, after in model.successors(now):
            if after not in came:
                came[after] = []
                queue.append(after)
            came[after].append(now)
    good = deque(state for state in came if state.newest == model.numbers or _is_led(state))
    reached = set(good)
    while good:
        for before in came[good.popleft()]:
            if before not in reached:
                reached.add(before)
                good.append(before)
    return [state for state in came if state not in reached]


def _is_led(now: Lease) -> bool:
    return any(node.phase == "running" and node.number == now.newest for node in now.nodes)
