"""Two runners' connection on loopback sockets: who is there, who is lost, and that nothing blocks."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from forged import forged
from hypothesis import given
from hypothesis import strategies as st

from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.supervisor import peers
from runner.supervisor.peer_messages import (
    End,
    Ended,
    Finish,
    Hello,
    PeerMessage,
    Ready,
    Welcome,
)
from runner.supervisor.peers import Leader, Member
from runner.system.event_loop import EventLoop


class Pair:
    """A leader and its members in one loop."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.heard: list[tuple[int, PeerMessage]] = []
        self.told: list[PeerMessage] = []
        self.leader: Leader | None = None
        self.refusal: str | None = None
        self.members: list[Member] = []

    def lead(self) -> Leader:
        self.leader = Leader(
            ("127.0.0.1", self.port),
            3,
            self.loop,
            lambda n, message: self.heard.append((n, message)),
            lambda hello: self.refusal,
        )
        return self.leader

    def join(self, number: int) -> Member:
        hello = Hello(node_rank=number)
        member = Member(("127.0.0.1", self.port), hello, self.loop, self.told.append)
        self.members.append(member)
        return member

    def until(self, condition: Callable[[], object], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            self.loop.pump(0.02)
            for member in self.members:
                member.check()
            if self.leader is not None:
                self.leader.check()

    def close(self) -> None:
        for member in self.members:
            member.close()
        if self.leader is not None:
            self.leader.close()
        self.loop.close()


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_RETRY_S", 0.02)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def crowd() -> Iterator[Pair]:
    """A leader with one member, for many strangers."""
    pair = Pair()
    leader, _ = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    yield pair
    pair.close()


def refusal_of(pair: Pair) -> tuple[int, str]:
    (message,) = pair.told
    assert isinstance(message, Finish)
    return message.exit_code, message.reason


def test_messages_go_both_ways(pair: Pair) -> None:
    leader, first, second = pair.lead(), pair.join(1), pair.join(2)
    pair.until(lambda: leader.present == {1, 2})
    leader.send(Welcome(run_id="abc"))
    leader.send(End(attempt=3, stacks=True), 2)
    first.send(Ready(nproc=2))
    second.send(Ended(attempt=3, failure=Failure(FailureKind.CRASHED, "x" * 300_000)))
    pair.until(lambda: len(pair.told) == 3 and len(pair.heard) == 4)
    assert Counter(type(message) for message in pair.told) == {End: 1, Welcome: 2}
    assert (1, Ready(nproc=2)) in pair.heard


def test_a_member_may_come_first_and_waits_for_the_leader(pair: Pair) -> None:
    member = pair.join(1)
    pair.until(lambda: "refused" in member.last_error.lower())
    leader = pair.lead()
    pair.until(lambda: leader.present == {1} and member.connected)


def test_an_end_of_the_connection_is_seen_at_once_by_both(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # By the end itself, not by the silence after it.
    monkeypatch.setattr(peers, "SILENCE_S", 1000.0)
    leader, member = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    member.close()
    pair.until(lambda: not leader.present)
    again = pair.join(1)
    pair.until(lambda: leader.present == {1})
    leader.close()
    pair.leader = None
    pair.until(lambda: not again.connected)


def test_silence_is_a_loss(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", 1.0)
    monkeypatch.setattr(peers, "_GAP_S", 0.5)
    leader = pair.lead()
    # It says who it is, and then nothing more: a machine that is cut off sends no end either.
    with socket.create_connection(("127.0.0.1", pair.port)) as silent:
        silent.sendall(b'{"do": "hello", "node_rank": 1}\n')
        pair.until(lambda: leader.present == {1})
        pair.until(lambda: not leader.present)


def test_signs_of_life_keep_a_quiet_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", 1.0)
    monkeypatch.setattr(peers, "PING_INTERVAL_S", 0.2)
    # Both sides are in this thread: whatever keeps it from its work keeps both.
    monkeypatch.setattr(peers, "_GAP_S", 0.5)
    leader, member = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    end = time.monotonic() + 2.5
    pair.until(lambda: time.monotonic() > end or not member.connected)
    assert leader.present == {1} and member.connected


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100 + b"\n",
        b'{"do": "ready", "nproc": 2}\n',
        b"[]\n",
        b"3\n",
        # Each of these ended the first machine's runner.
        pytest.param(b"[" * 200_000 + b"\n", id="deep"),
        b'{"do": "hello", "node_rank": 1e999}\n',
        b'{"do": "hello", "node_rank": true}\n',
        b'{"do": "stop", "reason": "says a stranger"}\n',
        b'{"do": "ended", "attempt": 1, "failure": {}}\n',
    ],
)
def test_a_stranger_is_shown_out(pair: Pair, noise: bytes) -> None:
    leader, _ = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    with socket.create_connection(("127.0.0.1", pair.port)) as stranger:
        stranger.sendall(noise)
        stranger.setblocking(False)

        def closed() -> bool:
            try:
                return stranger.recv(100) == b""
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        pair.until(closed)
    assert leader.present == {1} and all(number == 1 for number, _ in pair.heard)


@pytest.mark.parametrize(
    "message",
    [
        {"do": "event", "attempt": 1},
        {"do": "event", "attempt": 1, "event": {"event": "log", "step": 3, "loss": "low"}},
        {"do": "event", "attempt": 1, "event": {"event": "committed", "step": 3}},
        {"do": "event", "attempt": 1, "event": {"event": "batch_shape", "micro_batch": 0, "accumulation": 1}},
        {"do": "ended", "attempt": 1, "failure": {"kind": "unheard of"}},
        {"do": "ended", "attempt": "1", "failure": Failure(FailureKind.CRASHED, "x").to_dict()},
        {"do": "finish", "exit_code": 0},
        {"do": "stop"},
    ],
)
def test_a_node_whose_message_is_not_of_its_type_loses_its_connection(pair: Pair, message: dict[str, Any]) -> None:
    """And is one that comes back: nothing of it is acted on."""
    leader, member = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    forged: Any = SimpleNamespace(encode=lambda: json.dumps(message).encode() + b"\n")
    member.send(forged)
    pair.until(lambda: len(pair.heard) == 2)
    assert all(isinstance(heard, Hello) for _, heard in pair.heard)


@pytest.mark.parametrize("number", [0, 3, 99])
def test_a_node_rank_that_the_run_does_not_have_is_refused(pair: Pair, number: int) -> None:
    leader = pair.lead()
    pair.join(number)
    pair.until(lambda: pair.told)
    assert refusal_of(pair)[0] == 2 and f"node rank {number} is not one of the 3" in refusal_of(pair)[1]
    assert not leader.present and not pair.heard


def test_another_job_is_refused(pair: Pair) -> None:
    pair.refusal = "another job"
    leader = pair.lead()
    pair.join(1)
    pair.until(lambda: pair.told)
    assert pair.told == [Finish(exit_code=2, reason="another job")] and not leader.present


def test_a_second_live_machine_of_the_same_rank_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They replaced each other until the run was given up."""
    monkeypatch.setattr(peers, "PING_INTERVAL_S", 0.2)
    leader, first = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    second = pair.join(1)
    pair.until(lambda: pair.told)
    assert refusal_of(pair)[0] == 2 and "node rank 1 is taken by a live node" in refusal_of(pair)[1]
    assert [type(message) for _, message in pair.heard] == [Hello]
    first.send(Ready(nproc=2))
    pair.until(lambda: (1, Ready(nproc=2)) in pair.heard)
    second.close()


NAMES = ["do", "node_rank", "job", "attempt", "failure", "event", "details", "reason", "busy", "exit_code", "stacks"]
WORDS = ["hello", "ready", "ended", "event", "stop", "busy", "ping", "welcome", "begin", "end", "finish", "log"]
FORGED = forged(NAMES, WORDS)


@given(st.lists(FORGED, min_size=1, max_size=20))
def test_a_run_goes_on_whatever_strangers_say(crowd: Pair, lines: list[bytes]) -> None:
    """Each on a connection of its own, as the first one that is no message ends it."""
    assert crowd.leader is not None
    strangers = []
    for line in lines:
        strangers.append(socket.create_connection(("127.0.0.1", crowd.port)))
        with contextlib.suppress(OSError):
            strangers[-1].sendall(line + b"\n")
        # Who waits to be taken in waits in a queue that has an end.
        crowd.loop.pump(0.01)
    # Node 2 is absent: any peer that claims its rank is taken for it, as nodes do not prove their identity.
    crowd.heard.clear()
    crowd.members[0].send(Ready(nproc=2))
    crowd.until(lambda: (1, Ready(nproc=2)) in crowd.heard)
    for stranger in strangers:
        stranger.close()
    assert 1 in crowd.leader.present and {number for number, _ in crowd.heard} <= {1, 2}


def test_a_leader_that_was_stopped_does_not_take_a_dead_machine_for_a_live_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its own absence nobody is blamed; nor is that a word from the old connection."""
    leader, first = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    pair.members.clear()
    second = pair.join(1)
    pair.until(lambda: leader._claims)
    later = time.monotonic() + 9.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    leader.check()
    assert leader._claims
    monkeypatch.undo()
    second.close()
    first.close()


def test_a_machine_that_comes_back_replaces_its_old_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", 1.0)
    monkeypatch.setattr(peers, "PING_INTERVAL_S", 0.2)
    monkeypatch.setattr(peers, "_GAP_S", 0.5)
    leader, first = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    pair.members.clear()
    second = pair.join(1)
    pair.until(lambda: len(pair.heard) == 2)
    leader.send(Welcome(run_id="abc"))
    pair.until(lambda: pair.told)
    assert second.connected and len(pair.told) == 1
    first.close()


def test_a_name_that_does_not_resolve_is_told_and_tried_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unknown(host: str, *_: object, **__: object) -> NoReturn:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    # A real name server may be slow, or answer every name.
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    member = Member(("no-such-host.invalid", pair.port), Hello(node_rank=1), pair.loop, pair.told.append)
    pair.members.append(member)
    pair.until(lambda: len(asked) == 2)
    assert member.last_error == "no-such-host.invalid: Name or service not known" and not member.connected
