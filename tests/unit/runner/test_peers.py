"""Two runners' connection on loopback sockets: who is there, who is lost, and that nothing blocks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from runner import peers
from runner.loop import EventLoop
from runner.peers import Leader, Member, Message


class Pair:
    """A leader and its members in one loop."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.heard: list[tuple[int, Message]] = []
        self.told: list[Message] = []
        self.leader: Leader | None = None
        self.members: list[Member] = []

    def lead(self) -> Leader:
        self.leader = Leader(("127.0.0.1", self.port), self.loop, lambda n, message: self.heard.append((n, message)))
        return self.leader

    def join(self, number: int) -> Member:
        hello = {"do": "hello", "node_rank": number}
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


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_messages_go_both_ways(pair: Pair) -> None:
    leader, first, second = pair.lead(), pair.join(1), pair.join(2)
    pair.until(lambda: leader.present == {1, 2})
    leader.send({"do": "begin", "attempt": 3})
    leader.send({"do": "end"}, 2)
    first.send({"do": "ready"})
    second.send({"do": "ended", "text": "x" * 300_000})
    pair.until(lambda: len(pair.told) == 3 and len(pair.heard) == 4)
    assert sorted(message["do"] for message in pair.told) == ["begin", "begin", "end"]
    assert (1, {"do": "ready"}) in pair.heard


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
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100 + b"\n", b'{"do": "ready"}\n', b"[]\n", b"3\n"]
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


def test_a_machine_that_comes_back_replaces_its_old_connection(pair: Pair) -> None:
    leader, first = pair.lead(), pair.join(1)
    pair.until(lambda: leader.present == {1})
    pair.members.clear()
    second = pair.join(1)
    pair.until(lambda: sum(message["do"] == "hello" for _, message in pair.heard) == 2)
    leader.send({"do": "begin"})
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
    member = Member(("no-such-host.invalid", pair.port), {"do": "hello", "node_rank": 1}, pair.loop, pair.told.append)
    pair.members.append(member)
    pair.until(lambda: len(asked) == 2)
    assert member.last_error == "no-such-host.invalid: Name or service not known" and not member.connected
