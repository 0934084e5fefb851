"""A run of several nodes under a controller, in virtual time: what each node does, and what it exits with.

The decisions are the product's own (`policy.decide`, `policy.end_of_node`, `RestartState`); the order of the protocol's
steps is that of `runner.supervisor`, which tests/integration/test_machines.py kills at each step of its end.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from unit.deploy.controllers import KILLED, Controller, End, Verdict

from runner.errors import ExitCode
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, Restart, Stop, backoff_s, decide, end_of_node
from runner.recovery.restart_state import FINISHED_PATIENCE_S, RestartState

MAX_RESTARTS = 5
MAX_FAILED_SAVES = 5
JOB = "job"
OUT_OF_MEMORY, CRASHED, NETWORK = FailureKind.OUT_OF_MEMORY, FailureKind.CRASHED, FailureKind.NETWORK
_DAY_S = 86400.0
_MAX_EVENTS = 20_000


class Phase(Enum):
    AWAY = auto()  # no process
    WAITING = auto()  # for the other nodes
    TRAINING = auto()
    ENDING = auto()  # trained to the end; the last commit, the record, the word to the others


@dataclass
class _Node:
    phase: Phase = Phase.AWAY
    # Which life of the node this is: what was planned for an earlier one does not happen.
    life: int = 0
    bad: bool = False


@dataclass
class World:
    """One run from its first start to its end.

    Attributes:
        told_first: the leader tells the others of the end before the last commit is durable, as it once did.
        committed: the newest durable segment of `total`; `reached`: computed.
        faults: of each kind that did happen.
    """

    controller: Controller
    source: random.Random
    total: int = 3
    told_first: bool = False
    time: float = 0.0
    committed: int = 0
    reached: int = 0
    outcome: str | None = None
    storage_back_at: float = 0.0
    failed_saves: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.record = RestartState()
        self.nodes = [_Node() for _ in range(self.controller.num_nodes)]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = self._attempt = 0
        # Steps of the leader's end at which it is killed, once each.
        self.kill_leader_at: set[int] = set()
        for node in range(len(self.nodes)):
            self._after(self.source.uniform(5, 60), partial(self._start, node))

    # -- the clock

    def _after(self, delay_s: float, what: Callable[[], None], node: int | None = None) -> None:
        """For a node: only while its process lives."""
        self._number += 1
        life = self.nodes[node].life if node is not None else 0

        def happen() -> None:
            if node is None or self.nodes[node].life == life:
                what()

        heapq.heappush(self._heap, (self.time + delay_s, self._number, happen))

    def plan(self, at: float, what: Callable[[], None]) -> None:
        self._after(at - self.time, what)

    def run(self) -> str:
        """To its end: `done`, or why it needs a human; `stuck` where nothing more would happen."""
        for _ in range(_MAX_EVENTS):
            if self.outcome is not None:
                return self.outcome
            if not self._heap:
                return "stuck: nothing will happen any more"
            self.time, _, what = heapq.heappop(self._heap)
            what()
        return f"stuck: {_MAX_EVENTS} events, {self.time / _DAY_S:.0f} days"

    # -- a node's process

    @property
    def leader(self) -> _Node:
        return self.nodes[0]

    @property
    def storage_is_up(self) -> bool:
        return self.time >= self.storage_back_at

    def _start(self, node: int, *, elsewhere: bool = False) -> None:
        me = self.nodes[node]
        if me.phase is not Phase.AWAY or self.outcome is not None:
            return
        me.phase, me.bad = Phase.WAITING, me.bad and not elsewhere and self.source.random() < 0.5
        if not self.storage_is_up:
            # `check_storage`: nothing to begin with; each start tries for a while.
            self._after(60.0, lambda: self._exit(node, int(ExitCode.STORAGE_FAILED)), node)
            return
        if node == 0 and self.record.account_for_lost_runner(self.committed):
            decision = self._decide(None)
            if isinstance(decision, Stop):
                self._end_all(decision, set())
                return
        self._wait(node)

    def _wait(self, node: int) -> None:
        self.nodes[node].phase = Phase.WAITING
        timeout_s = self.controller.timeout_s
        attempt = self._attempt

        def give_up() -> None:
            waits = self.nodes[node].phase is Phase.WAITING and self._attempt == attempt
            if waits and (node == 0 or self.leader.phase is Phase.AWAY):
                self._exit(node, int(ExitCode.BUDGET_SPENT))
            elif waits:
                self._after(timeout_s, give_up, node)  # the leader is there, and has its own limit

        def look() -> None:
            """The others may have gone with the run finished."""
            alone = node == 0 or self.leader.phase is Phase.AWAY
            if self.nodes[node].phase is not Phase.WAITING or self._attempt != attempt:
                return
            if alone and self.storage_is_up and self.record.finished == JOB:
                self._exit(node, 0)
            else:
                self._after(FINISHED_PATIENCE_S, look, node)

        self._after(timeout_s, give_up, node)
        if not self.told_first:
            self._after(FINISHED_PATIENCE_S, look, node)
        self._after(1.0, self._gather)

    def _gather(self) -> None:
        if all(node.phase is Phase.WAITING for node in self.nodes):
            self._attempt += 1
            self.record.running, self.record.finished = self._attempt, ""
            self.reached, self.failed_saves = self.committed, 0
            for node in self.nodes:
                node.phase = Phase.TRAINING
            bad = {number for number, node in enumerate(self.nodes) if node.bad}
            if bad:
                self._after(30.0, lambda: self._fail(FailureKind.BAD_NODE, bad), 0)
            else:
                self._after(self.source.uniform(30, 900), self._segment, 0)

    def _segment(self) -> None:
        """A stretch of training ends, with a save."""
        if self.leader.phase is not Phase.TRAINING:
            return
        self.reached = min(self.reached + 1, self.total)
        if self.reached == self.total:
            for node in self.nodes:
                node.phase = Phase.ENDING
            self._end_step(0)
            return
        self._save()
        if self.failed_saves >= MAX_FAILED_SAVES:
            self._fail(FailureKind.STORAGE_FAILED, set())
        else:
            self._after(self.source.uniform(30, 900), self._segment, 0)

    def _save(self) -> bool:
        if not self.storage_is_up:
            self.failed_saves += 1
            return False
        self.committed, self.failed_saves = max(self.committed, self.reached), 0
        return True

    # -- ends

    def _end_step(self, step: int) -> None:
        """0: trained. 1: the last commit is durable. 2: that is on record. 3: the others know. 4: the leader ends."""
        if self.leader.phase is not Phase.ENDING:
            return
        if step in self.kill_leader_at:
            self.kill_leader_at.discard(step)
            self._count("leader killed at its end")
            self.kill(0)
            return
        followers = [number for number, node in enumerate(self.nodes) if number and node.phase is not Phase.AWAY]
        if step == 0 and self.told_first:
            for number in followers:
                self._exit(number, 0)
        elif step == 1 and not self._save():
            code = int(ExitCode.STORAGE_FAILED)
            for number in [0, *followers]:
                if self.nodes[number].phase is not Phase.AWAY:
                    self._exit(number, code)
            return
        elif step == 2:
            self.record.running = None
            self.record.history.clear()
            if not self.storage_is_up:
                self._after(5.0, lambda: self._end_step(3), 0)  # not on record: the note could not be written
                return
            self.record.finished = JOB
        elif step == 3:
            for number in followers:
                self._exit(number, 0)
        elif step == 4:
            self._exit(0, 0)
            return
        self._after(self.source.uniform(0.5, 60), lambda: self._end_step(step + 1), 0)

    def _decide(self, failure: Failure | None) -> Restart | Stop:
        if failure is not None:
            self.record.running = None
            self.record.add(AttemptRecord(failure, self.committed if self.committed else -1))
        return decide(self.record.history, max_restarts=MAX_RESTARTS, stop_requested=False, max_network_retries=8)

    def _fail(self, kind: FailureKind, bad: set[int], signature: str = "") -> None:
        """An attempt has ended, on all nodes that are there."""
        if self.leader.phase not in (Phase.TRAINING, Phase.ENDING):
            return
        decision = self._decide(Failure(kind, f"node {bad}: {kind.value}", step=self.reached + 1, signature=signature))
        if isinstance(decision, Stop):
            self._end_all(decision, bad)
            return
        pause_s = backoff_s(
            decision.failures_in_a_row, initial_s=2, max_s=300, jitter_s=1, source=self.source
        )  # fmt: skip
        for number, node in enumerate(self.nodes):
            if node.phase is not Phase.AWAY:
                node.phase = Phase.WAITING
                self._after(pause_s, partial(self._wait, number), number)

    def _end_all(self, decision: Stop, bad: set[int]) -> None:
        for number, node in enumerate(self.nodes):
            if node.phase is not Phase.AWAY:
                self._exit(number, int(end_of_node(decision, number, bad).exit_code))

    def _exit(self, node: int, code: int | None, *, disrupted: bool = False) -> None:
        """The process is gone; the controller hears of it."""
        me = self.nodes[node]
        if me.phase is Phase.AWAY or self.outcome is not None:
            return
        was = me.phase
        me.phase, me.life = Phase.AWAY, me.life + 1
        if node == 0:
            for number, other in enumerate(self.nodes):
                if number and other.phase in (Phase.TRAINING, Phase.ENDING) and code not in (0,):
                    self._wait(number)
        elif was is Phase.TRAINING and code != 0 and self.leader.phase is Phase.TRAINING:
            self._fail(FailureKind.NODE_LOST, set())
        elif was is Phase.ENDING and code not in (0,) and self.leader.phase is Phase.ENDING and not self._drained:
            # Its part of the last snapshot may be missing.
            self._fail(FailureKind.NODE_LOST, set())
        self._heard(self.controller.ended(End(node, code, disrupted, self.time)))

    @property
    def _drained(self) -> bool:
        return self.committed == self.total

    def _heard(self, verdict: Verdict) -> None:
        if self.outcome is not None:
            return
        if verdict.lost:
            for node in self.nodes:
                node.phase, node.life = Phase.AWAY, node.life + 1
        if verdict.outcome is not None:
            self.outcome = verdict.outcome
            return
        for start in verdict.starts:
            delay_s = start.delay_s + self.source.uniform(5, 300)
            self._after(delay_s, partial(self._start, start.node, elsewhere=start.elsewhere))

    # -- what happens to it

    def _count(self, name: str) -> None:
        self.faults[name] = self.faults.get(name, 0) + 1

    def kill(self, node: int) -> None:
        """Kill the runner alone, or its whole container because memory ran out."""
        self._count("runner killed")
        self._exit(node, KILLED)

    def lose(self, node: int) -> None:
        """Lose the machine. The cluster notices it, and removes the Node object, some minutes later [K4]."""
        me = self.nodes[node]
        if me.phase is Phase.AWAY:
            return
        self._count("machine lost")
        was, leader_was = me.phase, self.leader.phase
        me.phase, me.life, me.bad = Phase.AWAY, me.life + 1, False
        life = me.life
        self._miss(node, was, leader_was)

        def notice() -> None:
            if self.outcome is None and me.life == life:
                self._heard(self.controller.ended(End(node, None, True, self.time)))

        self._after(self.source.uniform(80, 400), notice)

    def _miss(self, node: int, was: Phase, leader_was: Phase) -> None:
        """What the others do when a machine is lost, with its phase and the leader's until then."""
        if node == 0:
            for number, other in enumerate(self.nodes):
                if number and other.phase in (Phase.TRAINING, Phase.ENDING):
                    self._wait(number)
        elif was is leader_was and leader_was in (Phase.TRAINING, Phase.ENDING) and not self._drained:
            self._fail(FailureKind.NODE_LOST, set())

    def drain(self, node: int) -> None:
        """SIGTERM on one node: all stop at one step, and save where storage answers."""
        me = self.nodes[node]
        if me.phase not in (Phase.TRAINING, Phase.WAITING):
            return
        self._count("drained")
        together = me.phase is Phase.TRAINING or (self.leader.phase is Phase.WAITING)
        if me.phase is Phase.TRAINING:
            self._save()
            self.record.running = None
        numbers = range(len(self.nodes)) if together else [node]
        for number in numbers:
            if self.nodes[number].phase in (Phase.TRAINING, Phase.WAITING):
                # One after the other: nobody is lost to the others by that.
                self.nodes[number].phase = Phase.WAITING
        for number in numbers:
            self._exit(number, int(ExitCode.PREEMPTED), disrupted=number == node)

    def rank_dies(self, kind: FailureKind) -> None:
        if self.leader.phase is Phase.TRAINING:
            self._count(kind.value)
            self._fail(kind, set())

    def node_turns_bad(self, node: int) -> None:
        if self.nodes[node].phase is Phase.TRAINING:
            self._count("bad node")
            self.nodes[node].bad = True
            self._fail(FailureKind.BAD_NODE, {node})

    def storage_goes(self, for_s: float) -> None:
        self._count("storage away")
        self.storage_back_at = max(self.storage_back_at, self.time + for_s)

    def bug(self) -> None:
        """The user's, that comes again."""
        if self.leader.phase is Phase.TRAINING:
            self._count("deterministic")
            self._fail(FailureKind.CRASHED, set(), signature="ValueError|train.py:3|7")


@dataclass
class ElasticWorld(World):
    """A run with `--nnodes MIN:MAX`: the others continue without a lost node, any may lead, and nodes are admitted.

    Attributes:
        min_nodes: fewer wait.
        grow_interval_s: from one change of the nodes to the admission of others.
        changes: how often the nodes of the run have changed while it went on.
    """

    min_nodes: int = 1
    grow_interval_s: float = 300.0
    changes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of the running attempt; and of those nodes, whose memory has the newest snapshot.
        self._members: set[int] = set()
        self._holders: set[int] = set()
        self._lead: int | None = None
        self._changed_at = 0.0

    @property
    def leader(self) -> _Node:
        return self.nodes[self._lead] if self._lead is not None else _Node()

    def _start(self, node: int, *, elsewhere: bool = False) -> None:
        me = self.nodes[node]
        if me.phase is not Phase.AWAY or self.outcome is not None:
            return
        me.phase, me.bad = Phase.WAITING, me.bad and not elsewhere and self.source.random() < 0.5
        if not self.storage_is_up and not self._members:
            self._after(60.0, lambda: self._exit(node, int(ExitCode.STORAGE_FAILED)), node)
        elif me.bad:
            # Its machine is excluded, or fails its check.
            self._after(5.0, lambda: self._exit(node, int(ExitCode.BAD_NODE)), node)
        else:
            self._wait(node)

    def _wait(self, node: int) -> None:
        self.nodes[node].phase = Phase.WAITING

        def give_up() -> None:
            if self.nodes[node].phase is Phase.WAITING and not self._members:
                self._exit(node, int(ExitCode.BUDGET_SPENT))
            elif self.nodes[node].phase is Phase.WAITING:
                self._after(self.controller.timeout_s, give_up, node)

        def look() -> None:
            if self.nodes[node].phase is not Phase.WAITING:
                return
            if not self._members and self.storage_is_up and self.record.finished == JOB:
                self._exit(node, 0)
            else:
                self._after(FINISHED_PATIENCE_S, look, node)

        self._after(self.controller.timeout_s, give_up, node)
        self._after(FINISHED_PATIENCE_S, look, node)
        self._after(8.0, self._gather)

    def _waiting(self) -> list[int]:
        return [number for number, node in enumerate(self.nodes) if node.phase is Phase.WAITING and not node.bad]

    def _gather(self) -> None:
        waiting = self._waiting()
        if self.record.finished == JOB or not waiting or self.outcome is not None:
            return
        if self._members:
            in_s = self._changed_at + self.grow_interval_s - self.time
            if in_s > 0:
                self._after(in_s, self._gather)
            elif all(self.nodes[number].phase is Phase.TRAINING for number in self._members):
                self._pause()
            return
        if len(waiting) < self.min_nodes:
            return
        holders = [number for number in waiting if number in self._holders]
        if self._lead not in waiting:
            self._lead = min(holders or waiting)
            # A leader that is lost in mid-attempt is a failure to the one that starts without its memory.
            if not holders and self.record.account_for_lost_runner(self.committed):
                decision = self._decide(None)
                if isinstance(decision, Stop):
                    self._end_all(decision, set())
                    return
        self._attempt += 1
        self.record.running, self.record.finished = self._attempt, ""
        self.reached = self.reached if holders else self.committed
        self.failed_saves, self._changed_at = 0, self.time
        self._members, self._holders = set(waiting), set(waiting)
        for number in waiting:
            self.nodes[number].phase = Phase.TRAINING
        self._next_segment()

    def _next_segment(self) -> None:
        attempt = self._attempt
        self._after(
            self.source.uniform(30, 900), lambda: self._segment() if attempt == self._attempt else None
        )  # fmt: skip

    def _segment(self) -> None:
        if not self._members or self.leader.phase is not Phase.TRAINING:
            return
        self.reached = min(self.reached + 1, self.total)
        if self.reached == self.total:
            for number in self._members:
                self.nodes[number].phase = Phase.ENDING
            self._end_step(0)
            return
        self._save()
        if self.failed_saves >= MAX_FAILED_SAVES:
            self._fail(FailureKind.STORAGE_FAILED, set())
        else:
            self._next_segment()

    def _end_step(self, step: int) -> None:
        lead, attempt = self._lead, self._attempt
        if lead is None or self.leader.phase is not Phase.ENDING:
            return
        if step in self.kill_leader_at:
            self.kill_leader_at.discard(step)
            self._count("leader killed at its end")
            self.kill(lead)
            return
        others = [number for number, node in enumerate(self.nodes) if number != lead and node.phase is not Phase.AWAY]
        if step == 1 and not self._save():
            self._members.clear()
            for number in [lead, *others]:
                self._exit(number, int(ExitCode.STORAGE_FAILED))
            return
        if step == 2:
            self.record.running = None
            self.record.history.clear()
            self.record.finished = JOB if self.storage_is_up else ""
        elif step == 3:
            self._members = {lead}
            for number in others:
                self._exit(number, 0)
        elif step == 4:
            self._members.clear()
            self._exit(lead, 0)
            return
        self._after(
            self.source.uniform(0.5, 60), lambda: self._end_step(step + 1) if attempt == self._attempt else None
        )  # fmt: skip

    def _fail(self, kind: FailureKind, bad: set[int], signature: str = "") -> None:
        if not self._members:
            return
        self._members.clear()
        decision = self._decide(Failure(kind, f"node {bad}: {kind.value}", step=self.reached + 1, signature=signature))
        if isinstance(decision, Stop):
            self._end_all(decision, bad)
        else:
            self._again()

    def _again(self) -> None:
        """The next attempt begins with the nodes that are there, from their memory."""
        self._members.clear()
        for number, node in enumerate(self.nodes):
            if node.phase in (Phase.TRAINING, Phase.ENDING):
                self._wait(number)

    def _pause(self) -> None:
        self.changes += 1
        self._save()
        self._again()

    def _gone(self, node: int, *, orderly: bool) -> None:
        """A node has left; the others go on where they can."""
        self._holders.discard(node)
        if node not in self._members:
            return
        self._members.discard(node)
        if not self._members:
            return
        self.changes += 1
        if orderly or self._drained:
            self._again()
        else:
            self._fail(FailureKind.NODE_LOST, set())

    def _exit(self, node: int, code: int | None, *, disrupted: bool = False) -> None:
        me = self.nodes[node]
        if me.phase is Phase.AWAY or self.outcome is not None:
            return
        me.phase, me.life = Phase.AWAY, me.life + 1
        self._gone(node, orderly=code in (0, int(ExitCode.PREEMPTED), int(ExitCode.BAD_NODE)))
        self._heard(self.controller.ended(End(node, code, disrupted, self.time)))

    def _miss(self, node: int, was: Phase, leader_was: Phase) -> None:
        self._gone(node, orderly=False)

    def drain(self, node: int) -> None:
        me = self.nodes[node]
        if me.phase not in (Phase.TRAINING, Phase.WAITING):
            return
        self._count("drained")
        leaves = [node]
        if me.phase is Phase.TRAINING:
            self._save()
            if len(self._members) - 1 < self.min_nodes:
                # Too few are left: the run stops.
                self.record.running = None
                leaves = [number for number, one in enumerate(self.nodes) if one.phase is not Phase.AWAY]
                self._members.clear()
        for number in leaves:
            self._exit(number, int(ExitCode.PREEMPTED), disrupted=number == node)

    def rank_dies(self, kind: FailureKind) -> None:
        if self._members and self.leader.phase is Phase.TRAINING:
            self._count(kind.value)
            self._fail(kind, set())

    def node_turns_bad(self, node: int) -> None:
        if self.nodes[node].phase is not Phase.TRAINING:
            return
        self._count("bad node")
        self.nodes[node].bad = True
        if len(self._members) - 1 >= self.min_nodes:
            self._exit(node, int(ExitCode.BAD_NODE))
        else:
            self._fail(FailureKind.BAD_NODE, {node})


def random_world(
    controller: Controller,
    source: random.Random,
    *,
    make: Callable[..., World] = World,
    bugs: bool = True,
    **options: Any,
) -> World:
    """Up to twelve faults over some hours."""
    world = make(controller, source, total=source.randint(1, 6), **options)
    nodes = len(world.nodes)
    for _ in range(source.randint(0, 12)):
        at, node, for_s = source.expovariate(1 / 3000), source.randrange(nodes), source.expovariate(1 / 1800)
        faults: list[Callable[[], None]] = [
            partial(world.kill, node),
            partial(world.lose, node),
            partial(world.drain, node),
            partial(world.node_turns_bad, node),
            *(partial(world.rank_dies, kind) for kind in (OUT_OF_MEMORY, CRASHED, NETWORK)),
            partial(world.storage_goes, for_s),
            lambda: world.kill_leader_at.add(source.randint(0, 4)),
            *([world.bug] if bugs else []),
        ]
        world.plan(at, source.choice(faults))
    return world
