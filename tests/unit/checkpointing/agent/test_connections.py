"""Processes that come, speak and go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.agent import connections, protocol
from checkpointing.agent.connections import Client, Connections
from checkpointing.agent.protocol import Message
from checkpointing.agent.server import Mailbox


class Desk:
    def __init__(self, path: str) -> None:
        self.path, self.mailbox = path, Mailbox[str]()
        self.abandoned = 0
        self.connections = Connections(protocol.listen(path), self.mailbox, self.abandon)

    def abandon(self) -> None:
        self.abandoned += 1

    def connect(self) -> tuple[socket.socket, Client]:
        before = set(map(id, self.connections))
        sock = protocol.connect(self.path, 60)
        self.poll()
        return sock, next(client for client in self.connections if id(client) not in before)

    def poll(self) -> list[Message]:
        return [message for _, message in self.connections.poll(0)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(str(tmp_path / "agent.sock"))
    yield desk
    desk.connections.close()


def test_messages_come_one_of_each_client_at_a_time(desk: Desk) -> None:
    (one, _), (two, _) = desk.connect(), desk.connect()
    for number in (1, 2):
        protocol.send(one, {"one": number})
        protocol.send(two, {"two": number})
    assert sorted(map(str, desk.poll())) == ["{'one': 1}", "{'two': 1}"]
    assert sorted(map(str, desk.poll())) == ["{'one': 2}", "{'two': 2}"]
    assert desk.poll() == []


def test_the_last_monitor_that_goes_is_noticed(desk: Desk) -> None:
    (one, first), (two, second), (three, _) = desk.connect(), desk.connect(), desk.connect()
    desk.connections.add_monitor(first)
    desk.connections.add_monitor(second)
    three.close()
    one.close()
    desk.poll()
    assert desk.connections.has_monitor and desk.abandoned == 0
    two.close()
    desk.poll()
    assert not desk.connections.has_monitor and desk.abandoned == 1 and list(desk.connections) == []


def test_a_monitor_that_is_stopped_misses_nothing(desk: Desk) -> None:
    """Ctrl-Z on the runner ended the agent, and with it the ranks, after 278 events."""
    sock, client = desk.connect()
    desk.connections.add_monitor(client)
    for number in range(1000):
        desk.connections.send_to_monitors({"event": number})
    assert client.unsent and desk.abandoned == 0
    sock.setblocking(False)
    received: list[Any] = []
    while len(received) < 1000:
        try:
            received.append(protocol.receive(sock)[0]["event"])
        except BlockingIOError:
            assert desk.poll() == []
    assert received == list(range(1000)) and not client.unsent
    # Nothing waits for room any more.
    assert desk.poll() == []
    sock.close()
    desk.poll()
    assert desk.abandoned == 1


def test_a_monitor_that_never_reads_is_disconnected_at_some_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MAX_UNSENT", 50)
    sock, client = desk.connect()
    desk.connections.add_monitor(client)
    for _ in range(100_000):
        desk.connections.send_to_monitors({"event": "x" * 1000})
        if not desk.connections.has_monitor:
            break
    assert desk.abandoned == 1 and not client.unsent
    desk.connections.send(client, {"to": "nobody"})
    sock.close()


def test_a_rank_that_does_not_read_is_disconnected(desk: Desk) -> None:
    sock, client = desk.connect()
    for _ in range(100_000):
        desk.connections.send(client, {"event": "x" * 1000})
        if not list(desk.connections):
            break
    assert list(desk.connections) == [] and desk.abandoned == 0
    sock.close()


def test_the_end_waits_for_what_a_monitor_has_not_read(desk: Desk) -> None:
    sock, client = desk.connect()
    desk.connections.add_monitor(client)
    for number in range(1000):
        desk.connections.send_to_monitors({"event": number})
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.extend(protocol.receive(sock)[0]["event"] for _ in range(1000)))
    reader.start()
    desk.connections.close()
    reader.join(30)
    assert received == list(range(1000))
    sock.close()


def test_what_ranks_have_left_unread_is_read_and_monitors_wait(desk: Desk) -> None:
    (rank, _), (monitor, client) = desk.connect(), desk.connect()
    desk.connections.add_monitor(client)
    protocol.send(monitor, {"do": "ping"})
    for number in range(3):
        protocol.send(rank, {"do": number})
    rank.close()
    assert [message["do"] for _, message in desk.connections.unread_of_ranks()] == [0, 1, 2]
    assert [message["do"] for message in desk.poll()] == ["ping"]


def test_the_mailbox_ends_the_wait(desk: Desk) -> None:
    desk.mailbox.post("done")
    assert list(desk.connections.poll()) == []
    assert list(desk.mailbox.take()) == ["done"]
