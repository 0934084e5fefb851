"""The commit protocol as a model: writers that take turns at every step and may crash at any, and the invariants.

A *script* is what one life of a writer does: a generator that yields one indivisible `Op` at a time and is sent what
the world answers. It reads like the code it stands for, and `test_commit_conformance.py` holds it to that. The world, a
disk (`disk_model.py`) or object storage (`object_model.py`), says what an `Op` may answer and what it leaves, and what
a crash may make of it. `explore` goes through every order of steps, breadth first, so that the first fault it finds has
the shortest way to it.

Life number n is attempt n: the first was given up but may live on; the second begins at any time; a third begins once
the second has died.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar


class Op(NamedTuple):
    """One indivisible step.

    Attributes:
        kind: what it does; `NOTES` do nothing but inform the judge; `at`, a failpoint, does nothing either.
        points: the failpoints that the code passes after it.
        idle: it changes nothing and its answer is not used, so it needs no turn of its own.
        may_go_back: afterwards a reader may find an older step, though nothing that was acknowledged is lost.
    """

    kind: str
    path: str = ""
    value: Any = None
    points: tuple[str, ...] = ()
    idle: bool = False
    may_go_back: bool = False


Answer = Hashable
Script = Generator[Op, Any, Any]
World = Any
NOTES = {"then", "acknowledged", "chosen", "rolled back", "sweeping", "sweeps", "swept"}


class Fence(NamedTuple):
    """As in the code; `accepted` is sorted, `oldest` is from which attempt on everything counts."""

    attempt: int = 0
    accepted: tuple[tuple[int, int], ...] = ()
    oldest: int = 0

    def admits(self, step: int, attempt: int) -> bool:
        """Return whether a reader may load the step."""
        return attempt >= self.oldest or (step, attempt) in self.accepted

    def lets_publish(self, step: int, attempt: int) -> bool:
        """Return whether a writer may publish the step."""
        return attempt >= self.attempt or (step, attempt) in self.accepted


class Life:
    """A script whose state is a number: one for each sequence of answers that it has received.

    A script that says `then` promises that what it does from there on depends on that note's value alone.
    """

    def __init__(self, start: Callable[[], Script]) -> None:
        self._start = start
        self._answers: list[tuple[Answer, ...]] = [()]
        self._ops = [self._replay(())]
        self._next: dict[tuple[int, Answer], int] = {}
        self._marks: dict[Answer, int] = {}

    def op(self, node: int) -> Op | None:
        """Return what the script does next; None if it has ended."""
        return self._ops[node]

    def advance(self, node: int, answer: Answer) -> int:
        found = self._next.get((node, answer))
        if found is None:
            found = self._next[node, answer] = len(self._ops)
            self._answers.append((*self._answers[node], answer))
            op = self._replay(self._answers[found])
            self._ops.append(op)
            if op is not None and op.kind == "then":
                found = self._next[node, answer] = self._marks.setdefault(op.value, found)
        return found

    def _replay(self, answers: Iterable[Answer]) -> Op | None:
        script = self._start()
        try:
            op = next(script)
            for answer in answers:
                op = script.send(answer)
        except StopIteration:
            return None
        return op


class Judged(NamedTuple):
    """What has been promised so far.

    Attributes:
        acknowledged: the newest step that was reported to its writer as committed, or that a life has resumed from.
        chosen: what the newest life has resumed from: its own number, the step, and its attempt.
        alone: the life that has looked for what to sweep while no other lived.
    """

    acknowledged: int
    chosen: tuple[int, int, int]
    alone: int = 0


class _Step(NamedTuple):
    """One turn, printed in traces."""

    life: int
    op: Op
    answer: Answer

    def __str__(self) -> str:
        what = " ".join(filter(None, (f"{self.life}: {self.op.kind}", self.op.path)))
        what += "".join(f" [{point}]" for point in self.op.points)
        return what if self.answer is None else f"{what} → {self.answer}"


class Situation(NamedTuple):
    """A state of everything. `nodes` are the lives', `DEAD` where it was killed."""

    world: int
    nodes: tuple[int, ...]
    crashes_left: int
    judged: Judged


DEAD = -1


class Fault(Exception):
    """An invariant does not hold."""


class CommitModel:
    """What the two models share: whose turn it may be, and the judge. Worlds go by number: most come up often."""

    lives: tuple[Life, ...]
    # Whose death matters: an older one that has died just never has its turn again, but the next one's sweep may know.
    first_mortal = 2

    def __init__(self, world: World, crashes: int, judged: Judged) -> None:
        self._worlds: list[World] = []
        self._numbers: dict[World, int] = {}
        self._views: list[tuple[int, int] | str] = []
        self._outcomes: dict[tuple[int, Op], tuple[tuple[Answer, int], ...]] = {}
        self._wrecks: dict[int, tuple[tuple[str, int], ...]] = {}
        self.first = Situation(self._number(world), (0,) * len(self.lives), crashes, judged)

    # -- what the model of a place says --------------------------------------------------------------------------

    def apply(self, world: World, op: Op) -> Iterable[tuple[Answer, World]]:
        """Yield every outcome that an operation may have."""
        raise NotImplementedError

    def view(self, world: World) -> tuple[int, int]:
        """Step and attempt of the newest checkpoint that counts and is whole, (0, 0) where there is none.

        Raises:
            Fault: the place cannot be read.
        """
        raise NotImplementedError

    def leftovers(self, world: World, attempt: int) -> list[str]:
        """Return what earlier attempts have left half done."""
        raise NotImplementedError

    def crashes(self, world: World) -> Iterable[tuple[str, World]]:
        """What a crash that ends every process may leave of the world; nothing where there is none such."""
        return ()

    def stirs(self, world: World) -> Iterable[tuple[str, World]]:
        """Yield what the world may do by itself."""
        return ()

    # -- whose turn it may be ------------------------------------------------------------------------------------

    def successors(self, now: Situation) -> Iterator[tuple[object, Situation]]:
        """Every next situation and how it comes about.

        Raises:
            Fault: in one of them something does not hold; the text begins with how it comes about.
        """
        nodes = now.nodes
        for index, life in enumerate(self.lives):
            node = nodes[index]
            op = None if node == DEAD or not self._may_begin(index, nodes) else life.op(node)
            if op is None:
                continue
            for answer, after in self._outcomes_of(now.world, op):
                what = _Step(index + 1, op, answer)
                step = self._settle(now, index, life.advance(node, answer), after, what)
                if after != now.world and not op.may_go_back:
                    self._check_went_back(now, step, what)
                yield what, step
        for stir, after in self.stirs(self._worlds[now.world]):
            yield stir, self._checked(now._replace(world=self._number(after)), stir)
        if now.crashes_left:
            yield from self._crashed(now)

    def _may_begin(self, index: int, nodes: tuple[int, ...]) -> bool:
        return index < 2 or nodes[index - 1] == DEAD

    def _is_over(self, index: int, node: int) -> bool:
        return node == DEAD or self.lives[index].op(node) is None

    def _is_alone(self, now: Situation, index: int) -> bool:
        others = [(other, node) for other, node in enumerate(now.nodes) if other != index]
        return all(self._is_over(other, node) or (node == 0 and other > index) for other, node in others)

    def _crashed(self, now: Situation) -> Iterator[tuple[object, Situation]]:
        left = now.crashes_left - 1
        for index, node in enumerate(now.nodes):
            if index + 1 >= self.first_mortal and node > 0 and not self._is_over(index, node):
                nodes = (*now.nodes[:index], DEAD, *now.nodes[index + 1 :])
                yield f"{index + 1} is killed", now._replace(nodes=nodes, crashes_left=left)
        # A life that has not begun yet may still begin.
        nodes = tuple(DEAD if node > 0 or index == 0 else node for index, node in enumerate(now.nodes))
        wrecks = self._wrecks.get(now.world)
        if wrecks is None:
            wrecks = tuple((what, self._number(after)) for what, after in self.crashes(self._worlds[now.world]))
            self._wrecks[now.world] = wrecks
        for what, after in wrecks:
            yield what, self._checked(Situation(after, nodes, left, now.judged), what)

    def _number(self, world: World) -> int:
        found = self._numbers.get(world)
        if found is None:
            found = self._numbers[world] = len(self._worlds)
            self._worlds.append(world)
            try:
                self._views.append(self.view(world))
            except Fault as fault:
                self._views.append(str(fault))
        return found

    def _outcomes_of(self, world: int, op: Op) -> tuple[tuple[Answer, int], ...]:
        found = self._outcomes.get((world, op))
        if found is None:
            outcomes = self.apply(self._worlds[world], op)
            found = self._outcomes[world, op] = tuple((answer, self._number(after)) for answer, after in outcomes)
        return found

    # -- the judge -----------------------------------------------------------------------------------------------

    def _settle(self, now: Situation, index: int, node: int, world: int, what: _Step) -> Situation:
        """Take the notes and idle steps that follow, then look whether everything holds."""
        life, judged = self.lives[index], now.judged
        while (op := life.op(node)) is not None and (op.idle or op.kind in NOTES):
            if op.kind in NOTES:
                judged = self._note(now, judged, index, op, world, what)
            node = life.advance(node, None)
        nodes = (*now.nodes[:index], node, *now.nodes[index + 1 :])
        return self._checked(Situation(world, nodes, now.crashes_left, judged), what)

    def _note(self, now: Situation, judged: Judged, index: int, op: Op, world: int, what: _Step) -> Judged:
        number = index + 1
        match op.kind:
            case "acknowledged":
                return judged._replace(acknowledged=max(judged.acknowledged, op.value))
            case "chosen":
                step, attempt, whole = op.value
                if not whole:
                    raise Fault(f"{what}: {number} resumes from step {step}, which is torn or mixed")
                # A step that a life has resumed from must be found from then on, even if no commit was reported.
                acknowledged = max(judged.acknowledged, step)
                return judged._replace(acknowledged=acknowledged, chosen=max(judged.chosen, (number, step, attempt)))
            case "rolled back":
                return judged._replace(acknowledged=min(judged.acknowledged, op.value))
            case "sweeping":
                return judged._replace(alone=number if self._is_alone(now, index) else 0)
            case "sweeps" if op.value > number:
                raise Fault(f"{what}: the sweep of {number} is about to take what {op.value} writes")
            case "swept" if (
                judged.alone == number
                and self._is_alone(now, index)
                and (left := self.leftovers(self._worlds[world], number))
            ):
                raise Fault(f"{what}: {number} has swept, but {', '.join(left)} is left")
        return judged

    def _checked(self, now: Situation, what: object) -> Situation:
        view = self._views[now.world]
        if isinstance(view, str):
            raise Fault(f"{what}: {view}")
        step, attempt = view
        if step < now.judged.acknowledged:
            raise Fault(f"{what}: step {now.judged.acknowledged} was acknowledged, but a reader finds {step or 'none'}")
        number, chosen, of = now.judged.chosen
        if attempt < number and step >= chosen and (step, attempt) != (chosen, of):
            raise Fault(f"{what}: {number} has resumed from step {chosen}, but now {attempt} has published {step}")
        return now

    def _check_went_back(self, before: Situation, after: Situation, what: _Step) -> None:
        was, now = self._views[before.world], self._views[after.world]
        assert not isinstance(was, str) and not isinstance(now, str)
        if now < (was[0],):
            raise Fault(f"{what}: a reader found step {was[0]}, and now {now[0] or 'none'}")


@dataclass(frozen=True)
class Outcome:
    """What `explore` has found.

    Attributes:
        fault: what did not hold; None where everything did, in all states there are.
        trace: the shortest way to it.
    """

    num_states: int
    num_steps: int
    duration_s: float
    fault: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        seen = f"{self.num_states} states, {self.num_steps} steps, {self.duration_s:.1f} s"
        return seen if self.fault is None else "\n".join([f"{self.fault} ({seen})", *self.trace])


State = TypeVar("State", bound=Hashable)


class Model(Protocol[State]):
    """What `explore` needs of a model.

    Attributes:
        first: the state that it begins in.
    """

    first: State

    def successors(self, now: State) -> Iterator[tuple[object, State]]:
        """Every next state and how it comes about; raises Fault where something does not hold."""


def explore(model: Model[State], max_states: int = 5_000_000) -> Outcome:
    """Breadth first, each state once.

    Raises:
        OverflowError: there are more states than that; nothing is known then.
    """
    began = time.perf_counter()
    came: dict[State, tuple[State, object] | None] = {model.first: None}
    queue = deque([model.first])
    num_steps = 0
    while queue:
        now = queue.popleft()
        try:
            for what, after in model.successors(now):
                num_steps += 1
                if after not in came:
                    came[after] = now, what
                    queue.append(after)
        except Fault as fault:
            last, _, text = str(fault).rpartition(": ")
            trace = (*_way(came, now), last)
            return Outcome(len(came), num_steps, time.perf_counter() - began, text, trace)
        if len(came) > max_states:
            raise OverflowError(f"more than {max_states} states")
    return Outcome(len(came), num_steps, time.perf_counter() - began)


def _way(came: dict[State, tuple[State, object] | None], now: State) -> list[str]:
    way: list[str] = []
    while (step := came[now]) is not None:
        now, what = step
        way.append(str(what))
    return way[::-1]
