"""The agent's answers, in this process and without threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from unit.checkpointing.agent.doubles import Store, UnthreadedWorker, save

from checkpointing.agent import protocol
from checkpointing.agent.options import AgentOptions
from checkpointing.agent.protocol import Message
from checkpointing.agent.reporting import Report
from checkpointing.agent.server import Agent
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.tiers import Tiers
from checkpointing.host.shared_memory import SharedMemory
from checkpointing.storage.object_storage import ObjectStorage


class Peer:
    """A connected process."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._sock = desk, protocol.connect(desk.path)
        self._sock.setblocking(False)
        self.arenas: dict[int, SharedMemory] = {}
        desk.serve()

    def say(self, do: str, **details: object) -> list[Message]:
        """Send a request; what has been answered when all is done that can be done."""
        protocol.send(self._sock, {"do": do, **details})
        self._desk.serve()
        return self.heard()

    def heard(self) -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                message, fds = protocol.receive(self._sock)
            except BlockingIOError:
                return messages
            messages.append(message)
            if "arena" in message and fds:
                self.arenas[message["arena"]] = SharedMemory.attach(fds.pop())
            for fd in fds:
                os.close(fd)

    def hang_up(self) -> None:
        self._sock.close()
        self._desk.serve()


class Desk:
    """An agent, and who speaks to it."""

    def __init__(self, folder: Path, commits: bool = True) -> None:
        self.path = str(folder / "agent.sock")
        self.store = Store()
        self.workers: list[UnthreadedWorker] = []
        options = AgentOptions(location="memory://here", run_id="run", commits=commits)
        self.agent = Agent(protocol.listen(self.path), Tiers(ObjectStorage(self.store)), options, self._make)

    def _make(self, tiers: Tiers, report: Report, commits: bool) -> UnthreadedWorker:
        self.workers.append(UnthreadedWorker(tiers, report, commits))
        return self.workers[-1]

    def serve(self, rounds: int = 4) -> None:
        for _ in range(rounds):
            self.agent.serve_once(0)
            for worker in self.workers:
                worker.run_pending()
        self.agent.serve_once(0)

    def monitor(self) -> Peer:
        peer = Peer(self)
        assert peer.say("hello", role="monitor") == [{"run_id": "run"}]
        return peer

    def rank(self, local_rank: int = 0, num_ranks: int = 1, attempt: int = 1, stage: str = "") -> Peer:
        peer = Peer(self)
        where = {"name": stage, "number": 1 if not stage else 2, "steps_before": 0 if not stage else 10}
        self.greeting = peer.say(
            "hello",
            role="rank",
            attempt=attempt,
            rank=local_rank,
            local_rank=local_rank,
            local_world_size=num_ranks,
            fetch=True,
            stage=where,
        )
        return peer

    @property
    def committed(self) -> list[int]:
        return Catalog(ObjectStorage(self.store)).committed_steps()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield Desk(tmp_path)


def acquire(rank: Peer, step: int, number: int = 1, wait: bool = False) -> list[Message]:
    return rank.say("acquire", step=step, number=number, nbytes=5, wait=wait, urgent=False)


def stage(rank: Peer, step: int, arena: int, commit: bool = True, receives: bool = False) -> list[Message]:
    return rank.say("staged", **staged(step, arena, commit, receives))


def staged(step: int, arena: int, commit: bool = True, receives: bool = False) -> Message:
    retention = {"keep_last": 2, "keep_every": None, "keep_best": 2, "best_metric": None, "greater_is_better": False}
    details = {
        "world_size": 1,
        "samples_consumed": step,
        "metrics": {},
        "retention": retention,
        "commit": commit,
        "receives": receives,
    }
    return {"step": step, "arena": arena, "files": [("file", 0, 5)], **details}


def test_a_copy_of_another_nodes_shard_is_received_by_a_rank_of_this_attempt(desk: Desk) -> None:
    monitor, rank = desk.monitor(), desk.rank()
    guest = {"name": "shards/1.bin", "offset": 4096, "nbytes": 9, "digest": "d"}
    (reply,) = acquire(rank, 5)
    stage(rank, 5, reply["arena"], commit=False, receives=True)
    (arena,) = (arena for arena in desk.agent._pool.arenas if arena.step == 5)
    for sender in (monitor, rank):
        assert not arena.guests and arena.receiving == {0}
        sender.say("received", step=5, arena=reply["arena"], guest=guest)
    assert arena.guests == {"shards/1.bin": (4096, 9, "d")} and not arena.receiving


def names(messages: list[Message]) -> list[str]:
    return [message["event"] for message in messages if message["event"] != "transfer"]


def test_a_save_is_answered_and_monitored(desk: Desk) -> None:
    monitor, rank = desk.monitor(), desk.rank()
    assert desk.greeting == [{"run_id": "run"}]
    [answer] = acquire(rank, 5)
    assert answer == {"arena": 0, "live": [0, 1]} and 0 in rank.arenas
    assert stage(rank, 5, 0) == []
    assert rank.say("wait", step=5) == [{"committed": True, "error": None}]
    assert names(monitor.heard()) == ["snapshot", "committed"]
    assert desk.committed == [5]
    assert desk.agent._attempt.control.last_commit.step == 5


def test_who_waits_is_answered_when_the_commit_has_ended(desk: Desk) -> None:
    rank = desk.rank()
    desk.store.refuses = "no space"
    acquire(rank, 5)
    stage(rank, 5, 0)
    [answer] = rank.say("wait", step=5)
    assert not answer["committed"] and "no space" in answer["error"]


def test_peers_wait_for_their_leader(desk: Desk) -> None:
    leader, peer = desk.rank(0, 2), desk.rank(1, 2)
    assert acquire(peer, 5) == []
    assert acquire(leader, 5) == [{"arena": 0, "live": [0, 1]}]
    assert peer.heard() == [{"arena": 0, "live": [0, 1]}]


def test_a_busy_agent_skips_or_has_the_leader_wait(desk: Desk) -> None:
    monitor, leader, _ = desk.monitor(), desk.rank(0, 2), desk.rank(1, 2)
    acquire(leader, 1, 1)
    acquire(leader, 2, 2)
    assert acquire(leader, 3, 3) == [{"busy": True}]
    assert names(monitor.heard()) == ["snapshot_skipped"]
    assert acquire(leader, 3, 4, wait=True) == []
    assert leader.say("abandon", step=1, arena=0, reason="torn") == []
    # Asked again as soon as anything has happened that may have freed an arena.
    answers = leader.say("offer", settled=True)
    assert [answer["arena"] for answer in answers if "arena" in answer] == [0]


def test_an_older_attempt_is_refused(desk: Desk) -> None:
    old = desk.rank(attempt=1)
    desk.rank(attempt=2)
    assert acquire(old, 5) == [{"error": "this attempt is over"}]
    stage(old, 5, 0)
    old.say("abandon", step=5, arena=0, reason="")
    desk.rank(attempt=1)
    assert desk.greeting == [{"error": "attempt 1 is over; 2 runs now"}]


def test_a_rank_of_another_stage_is_refused(desk: Desk) -> None:
    monitor, first = desk.monitor(), desk.rank()
    desk.rank(stage="stage-2")
    [answer] = acquire(first, 5)
    assert "another CheckpointManager of this script trains now" in answer["error"]
    assert monitor.heard() == [{"event": "stage", "stage": "stage-2", "number": 2, "steps_before": 10}]
    assert len(desk.workers) == 2


def test_events_of_a_later_stage_say_so(desk: Desk) -> None:
    monitor = desk.monitor()
    rank = desk.rank(stage="stage-2")
    monitor.heard()
    rank.say("announce", event={"event": "log", "step": 3, "loss": 1.0})
    assert monitor.heard() == [{"event": "log", "step": 3, "loss": 1.0, "stage": "stage-2", "run_step": 13}]
    acquire(rank, 5)
    stage(rank, 5, 0, commit=False)
    [taken] = monitor.heard()
    assert (taken["event"], taken["stage"], taken["run_step"]) == ("snapshot", "stage-2", 15)


def test_the_end_of_an_attempt_commits_what_its_ranks_have_left(desk: Desk) -> None:
    monitor, rank = desk.monitor(), desk.rank()
    acquire(rank, 5, 1)
    stage(rank, 5, 0, commit=False)
    acquire(rank, 6, 2)
    # Dead, and its last messages unread.
    for _ in range(3):
        protocol.send(rank._sock, {"do": "announce", "event": {"event": "log", "step": 6}})
    rank._sock.close()
    answers = names(monitor.say("end_attempt"))
    assert answers == ["snapshot", "log", "log", "log", "snapshot_dropped", "attempt_over", "committed"]
    assert desk.committed == [5]


def test_an_attempt_resumes_from_memory(desk: Desk) -> None:
    rank = desk.rank()
    acquire(rank, 5)
    stage(rank, 5, 0, commit=False)
    [answer] = desk.rank(attempt=2).say("offer", settled=True)
    [snapshot] = answer["snapshots"]
    assert (snapshot["step"], snapshot["attempt"], answer["arenas"], answer["unreachable"]) == (5, 1, [0], None)


def test_a_checkpoint_that_is_being_read_is_offered_once_it_is_there(desk: Desk) -> None:
    save(ObjectStorage(desk.store), 5)
    peer = desk.rank(attempt=2)
    [answer] = peer.say("offer", settled=True)
    assert [snapshot["step"] for snapshot in answer["snapshots"]] == [5]


def test_storage_that_cannot_be_reached_is_told(desk: Desk) -> None:
    desk.store.refuses = "no route to host"
    assert desk.rank().say("offer", settled=True) == [{"storage_error": "memory://here: no route to host"}]


def test_a_damaged_snapshot_is_told_and_not_offered(desk: Desk) -> None:
    monitor, rank = desk.monitor(), desk.rank()
    acquire(rank, 5)
    stage(rank, 5, 0, commit=False)
    rank.say("discard", step=5, reason="it differs", damaged=True)
    assert names(monitor.heard()) == ["snapshot", "snapshot_damaged"]
    [answer] = rank.say("offer", settled=True)
    assert answer["snapshots"] == []


def test_what_a_supervisor_keeps_is_written(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"0123456789")
    monitor = desk.monitor()
    monitor.say("restart_state", text='{"attempt": 1}')
    monitor.say("sidecar", name="journal.jsonl", path=str(tmp_path / "journal"), start=2, end=5)
    sidecars = ObjectStorage(desk.store).sidecars
    assert (sidecars.read_restart_state(), sidecars.read("journal.jsonl")) == (b'{"attempt": 1}', b"234")


def test_the_stop_request_is_of_one_attempt(desk: Desk) -> None:
    monitor, control = desk.monitor(), desk.agent._attempt.control
    assert monitor.say("begin_attempt", attempt=1, fetch=False) == [{"event": "attempt_begun", "attempt": 1}]
    monitor.say("request_stop")
    assert control.stop_requested
    monitor.say("begin_attempt", attempt=2, fetch=False)
    assert not control.stop_requested


def test_requests_to_save_are_counted_by_attempt(desk: Desk) -> None:
    monitor, control = desk.monitor(), desk.agent._attempt.control
    monitor.say("begin_attempt", attempt=1, fetch=False)
    monitor.say("request_save")
    monitor.say("request_save")
    assert control.saves_requested == 2 and not control.stop_requested
    monitor.say("begin_attempt", attempt=2, fetch=False)
    assert control.saves_requested == 0


def test_a_stop_request_can_be_followed_by_one_to_commit_what_there_is(desk: Desk) -> None:
    monitor, newest = desk.monitor(), Mock()
    desk.agent._scheduler.commit_newest = newest  # type: ignore[method-assign]
    monitor.say("commit_newest")
    newest.assert_called_once_with(ranks_go_on=True)


def test_small_talk(desk: Desk) -> None:
    monitor = desk.monitor()
    assert monitor.say("ping") == [{"event": "pong"}]
    assert monitor.say("dance") == [{"error": "unknown request 'dance'"}]


@pytest.mark.parametrize("how", ["the monitor hangs up", "shutdown", "SIGTERM"])
def test_the_agent_ends_when_the_newest_snapshot_is_committed(how: str, desk: Desk) -> None:
    monitor = desk.monitor() if how != "SIGTERM" else None
    rank = desk.rank()
    acquire(rank, 5)
    stage(rank, 5, 0, commit=False)
    if monitor is None:
        desk.agent.stop()
    elif how == "shutdown":
        monitor.say("shutdown")
    else:
        monitor.hang_up()
    desk.serve()
    assert desk.agent.run() is True
    assert desk.committed == [5]


def test_what_a_rank_said_before_it_died_is_heard_although_the_signal_comes_first(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's death is a signal, which came between two looks at the connections: its last save was dropped."""
    rank = desk.rank()
    acquire(rank, 5)
    poll = desk.agent._connections.poll

    def die(timeout_s: float | None) -> list[Any]:
        found = list(poll(timeout_s))
        monkeypatch.undo()
        protocol.send(rank._sock, {"do": "staged", **staged(5, 0)})
        rank._sock.close()
        desk.agent.stop()
        return found

    monkeypatch.setattr(desk.agent._connections, "poll", die)
    desk.serve()
    assert desk.agent.run() is True
    assert desk.committed == [5]


def test_a_signal_is_the_monitors_to_answer(desk: Desk) -> None:
    monitor = desk.monitor()
    desk.agent.stop()
    assert not desk.agent._scheduler.is_ending
    assert monitor.say("ping") == [{"event": "pong"}]


def test_an_agent_that_could_not_commit_says_so(desk: Desk) -> None:
    rank = desk.rank()
    acquire(rank, 5)
    stage(rank, 5, 0, commit=False)
    desk.store.refuses = "no space"
    desk.agent.stop()
    desk.serve()
    assert desk.agent.run() is False
