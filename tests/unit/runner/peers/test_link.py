"""Two runners' connection on loopback sockets: who is there, who is lost, and that nothing blocks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from helpers.forged import forged
from hypothesis import given
from hypothesis import strategies as st
from infra.ports import free_port

from runner.peers import connection as peer_connection
from runner.peers import link as peers
from runner.peers.auth import MAX_HANDSHAKE_BYTES, PeerAuth
from runner.peers.link import MAX_STRANGERS, Leader, Member
from runner.peers.messages import (
    End,
    Ended,
    Finish,
    Hello,
    PeerMessage,
    Ready,
    Welcome,
)
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.system.event_loop import EventLoop

SECRET = b"0123456789abcdef" * 4


class Pair:
    """A leader and its members in one loop."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.heard: list[tuple[int, PeerMessage]] = []
        self.told: list[PeerMessage] = []
        self.warnings: list[str] = []
        self.leader: Leader | None = None
        self.refusal: Finish | None = None
        self.members: list[Member] = []

    def lead(self, num_nodes: int | None = 3) -> Leader:
        self.leader = Leader(
            ("127.0.0.1", self.port),
            num_nodes,
            self.loop,
            lambda n, message: self.heard.append((n, message)),
            lambda hello: self.refusal,
            secret=SECRET,
            warn=self.warnings.append,
        )
        return self.leader

    def join(self, number: int, read_secret: Callable[[], bytes | None] = lambda: SECRET) -> Member:
        hello = Hello(node_rank=number)
        member = Member(("127.0.0.1", self.port), hello, self.loop, self.told.append, read_secret=read_secret)
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


@contextlib.contextmanager
def authenticated(pair: Pair) -> Iterator[tuple[socket.socket, PeerAuth]]:
    """A socket to the leader that has the run's secret."""
    auth = PeerAuth(SECRET, "member")
    with socket.create_connection(("127.0.0.1", pair.port)) as sock:
        sock.setblocking(False)
        heard = b""

        def proved() -> bool:
            nonlocal heard
            with contextlib.suppress(BlockingIOError):
                heard += sock.recv(1000)
            *lines, heard = heard.split(b"\n")
            for line in lines:
                sock.sendall(auth.answer(line))
            return auth.done

        pair.until(proved)
        yield sock, auth


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


def test_a_member_that_is_about_to_connect_turns_to_the_next_leader(pair: Pair) -> None:
    """The connection to the lost leader may come through meanwhile: its machine, or its kernel, lives."""
    with socket.create_server(("127.0.0.1", 0)) as lost:
        member = pair.join(1)
        member.follow(lost.getsockname())
        member.check()
        assert member._connecting is not None
        leader = pair.lead()
        member.follow(("127.0.0.1", pair.port))
        pair.until(lambda: leader.present == {1} and member.connected)


def test_a_name_that_was_resolved_for_another_leader_is_not_used(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may answer for the lost leader after this node has turned to the next one."""
    names = {"lost.invalid": threading.Event(), "next.invalid": threading.Event()}

    def resolve(host: str, port: int, **_: Any) -> Any:
        assert names[host].wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr("runner.peers.link.socket.getaddrinfo", resolve)
    leader, member = pair.lead(), pair.join(1)
    member.follow(("lost.invalid", pair.port))
    member.check()
    late = member._resolver
    assert late is not None
    member.follow(("next.invalid", pair.port))
    member.check()
    names["lost.invalid"].set()
    late.join()
    member._try_at = 0.0
    member.check()
    assert member._connecting is None
    names["next.invalid"].set()
    pair.until(lambda: leader.present == {1} and member.connected)


def test_an_end_of_the_connection_is_seen_at_once_by_both(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # By the end itself, not by the silence after it.
    monkeypatch.setattr(peer_connection, "SILENCE_S", 1000.0)
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
    monkeypatch.setattr(peer_connection, "SILENCE_S", 1.0)
    monkeypatch.setattr(peer_connection, "_GAP_S", 0.5)
    leader = pair.lead()
    # It says who it is, and then nothing more: a machine that is cut off sends no end either.
    with authenticated(pair) as (silent, auth):
        silent.sendall(auth.seal(b'{"do": "hello", "node_rank": 1}') + b"\n")
        pair.until(lambda: leader.present == {1})
        pair.until(lambda: not leader.present)


def test_signs_of_life_keep_a_quiet_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "SILENCE_S", 1.0)
    monkeypatch.setattr(peer_connection, "PING_INTERVAL_S", 0.2)
    # Both sides are in this thread: whatever keeps it from its work keeps both.
    monkeypatch.setattr(peer_connection, "_GAP_S", 0.5)
    leader, member = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    end = time.monotonic() + 2.5
    pair.until(lambda: time.monotonic() > end or not member.connected)
    assert leader.present == {1} and member.connected


NOISE = [
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
]


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1000) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("noise", [*NOISE, b'{"do": "hello", "node_rank": 2}\n', b"x" * 10_000, b"proof " * 99])
def test_a_stranger_is_shown_out(pair: Pair, noise: bytes) -> None:
    leader, _ = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    with socket.create_connection(("127.0.0.1", pair.port)) as stranger:
        stranger.sendall(noise)
        stranger.setblocking(False)
        pair.until(lambda: is_closed(stranger))
    assert leader.present == {1} and all(number == 1 for number, _ in pair.heard)


@pytest.mark.parametrize("noise", NOISE)
def test_a_node_that_says_no_hello_is_shown_out(pair: Pair, noise: bytes) -> None:
    leader, _ = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    with authenticated(pair) as (sock, auth):
        sock.setblocking(True)
        sock.sendall(auth.seal(noise.rstrip(b"\n")) + b"\n")
        sock.setblocking(False)
        pair.until(lambda: is_closed(sock))
    assert leader.present == {1} and all(number == 1 for number, _ in pair.heard)


def test_a_stranger_that_waits_or_dribbles_is_shown_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "HANDSHAKE_TIMEOUT_S", 0.2)
    leader = pair.lead()
    with contextlib.ExitStack() as stack:
        silent, dribbling = (stack.enter_context(socket.create_connection(("127.0.0.1", pair.port))) for _ in range(2))
        for sock in (silent, dribbling):
            sock.setblocking(False)

        def both_closed() -> bool:
            with contextlib.suppress(OSError):
                dribbling.send(b"p")
            return is_closed(silent) and is_closed(dribbling)

        pair.until(both_closed)
    assert not leader._strangers


def test_the_port_is_on_one_address_if_asked_for() -> None:
    loop = EventLoop()
    leader = Leader(("", free_port()), 2, loop, lambda *_: None, secret=SECRET, bind="127.0.0.2")
    address, port = leader._listener.getsockname()
    assert address == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    leader.close()
    loop.close()


def test_a_crowd_of_strangers_costs_little_and_keeps_nobody_out(pair: Pair) -> None:
    leader, member = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", pair.port)))
            stranger.send(b"proof")
            pair.loop.pump(0)
        pair.join(2)
        pair.until(lambda: leader.present == {1, 2})
        assert len(leader._strangers) <= MAX_STRANGERS
        assert sum(len(stranger._buffer) for stranger, _ in leader._strangers) <= MAX_STRANGERS * MAX_HANDSHAKE_BYTES
        member.send(Ready(nproc=2))
        pair.until(lambda: (1, Ready(nproc=2)) in pair.heard)


def test_a_node_with_another_secret_is_named_to_both(pair: Pair) -> None:
    leader, other = pair.lead(), pair.join(1, read_secret=lambda: b"another secret")
    pair.until(lambda: pair.warnings and "RUNNER_SECRET" in other.last_error)
    assert not leader.present and not pair.heard and not pair.told
    (line,) = pair.warnings
    assert "127.0.0.1" in line and "another secret" in line


def test_a_node_waits_for_the_secret_and_takes_a_new_one(pair: Pair) -> None:
    """The first node writes it when it starts; one that starts over writes another one."""
    secrets: list[bytes | None] = [None, b"of the run before", SECRET]
    leader, member = pair.lead(), pair.join(1, read_secret=lambda: secrets.pop(0) if len(secrets) > 1 else secrets[0])
    pair.until(lambda: "has not written this run's secret" in member.last_error)
    pair.until(lambda: leader.present == {1})


def test_a_storage_that_refuses_the_secret_is_named(pair: Pair) -> None:
    def refused() -> bytes:
        raise PermissionError(13, "Permission denied")

    pair.lead()
    member = pair.join(1, read_secret=refused)
    pair.until(lambda: "the run's secret cannot be read" in member.last_error)
    assert "Permission denied" in member.last_error


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


def test_a_run_that_may_have_spares_has_any_node_rank_but_the_leaders(pair: Pair) -> None:
    leader = pair.lead(num_nodes=None)
    pair.join(99)
    pair.until(lambda: leader.present == {99})
    pair.join(0)
    pair.until(lambda: pair.told)
    assert refusal_of(pair) == (2, "node rank 0 is not free: the leader has it (--nnodes)")


def test_another_job_is_refused(pair: Pair) -> None:
    pair.refusal = Finish(exit_code=2, reason="another job")
    leader = pair.lead()
    pair.join(1)
    pair.until(lambda: pair.told)
    assert pair.told == [Finish(exit_code=2, reason="another job")] and not leader.present


def test_a_second_live_machine_of_the_same_rank_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They replaced each other until the run was given up."""
    monkeypatch.setattr(peer_connection, "PING_INTERVAL_S", 0.2)
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
def test_a_run_goes_on_whatever_nodes_say(crowd: Pair, lines: list[bytes]) -> None:
    """Each on a connection of its own, as the first one that is no message ends it."""
    assert crowd.leader is not None
    with contextlib.ExitStack() as stack:
        for line in lines:
            sock, auth = stack.enter_context(authenticated(crowd))
            with contextlib.suppress(OSError):
                sock.sendall(auth.seal(line) + b"\n")
        # Node 2 is absent: any node that claims its rank is taken for it.
        crowd.heard.clear()
        crowd.members[0].send(Ready(nproc=2))
        crowd.until(lambda: (1, Ready(nproc=2)) in crowd.heard)
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
    monkeypatch.setattr(peer_connection, "SILENCE_S", 1.0)
    monkeypatch.setattr(peer_connection, "PING_INTERVAL_S", 0.2)
    monkeypatch.setattr(peer_connection, "_GAP_S", 0.5)
    leader, first = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    pair.members.clear()
    second = pair.join(1)
    pair.until(lambda: len(pair.heard) == 2)
    leader.send(Welcome(run_id="abc"))
    pair.until(lambda: pair.told)
    assert second.connected and len(pair.told) == 1
    first.close()


def test_a_node_that_was_cut_off_replaces_its_own_connection_whatever_that_delivers(pair: Pair) -> None:
    """What it had sent before arrived after its second hello: it was taken for two nodes of one rank, exit code 2."""
    leader, member = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    old = member._connection
    assert old is not None
    member._connection = None
    pair.until(lambda: leader._claims or [type(message) for _, message in pair.heard].count(Hello) == 2)
    old.send(Ready(nproc=2))
    member.send(Ready(nproc=3))
    pair.until(lambda: pair.told or (1, Ready(nproc=3)) in pair.heard)
    assert leader.present == {1} and member.connected and not leader._claims and not pair.told
    old.close()


def test_what_was_on_its_way_does_not_make_a_dead_node_live(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node was killed and started again; its last words come late."""
    # They come before this, or the test takes them for signs of life.
    monkeypatch.setattr(peers, "_SETTLING_PINGS", 1000)
    leader, first = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    pair.members.clear()
    second = pair.join(1)
    pair.until(lambda: leader._claims)
    first.send(Ready(nproc=2))
    pair.until(lambda: (1, Ready(nproc=2)) in pair.heard)
    leader.check()
    assert leader._claims and not pair.told
    first.close()
    pair.until(lambda: second.connected and not leader._claims and leader.present == {1})


def test_a_name_that_does_not_resolve_is_told_and_tried_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unknown(host: str, *_: object, **__: object) -> NoReturn:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    # A real name server may be slow, or answer every name.
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    member = Member(
        ("no-such-host.invalid", pair.port), Hello(node_rank=1), pair.loop, pair.told.append, read_secret=lambda: SECRET
    )
    pair.members.append(member)
    pair.until(lambda: len(asked) == 2)
    assert member.last_error == "no-such-host.invalid: Name or service not known" and not member.connected
