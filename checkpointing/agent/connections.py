"""The agent's connected processes: who they are, what they wait for, and their sockets."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from checkpointing.agent import protocol
from checkpointing.agent.protocol import Message

# Of one monitor: days of events, for as long as its process is stopped (Ctrl-Z).
_MAX_UNSENT = 20_000
# Seconds at the agent's end for a monitor to read what it has not read yet.
_LAST_S = 10.0


@dataclass(eq=False)
class Client:
    """A connected process.

    Attributes:
        sock: Its socket.
        is_monitor: It receives every event, and keeps the agent alive.
        local_rank: Its rank on this node; None for a monitor, or before its hello.
        local_world_size: Ranks of this node.
        attempt: Attempt that the rank belongs to.
        stage: Name of the stage that the rank trains.
        sent_arenas: Numbers of the arenas whose descriptors it has received.
        waits_for_arena: The request that is to be answered when an arena is free, or its leader has decided.
        waits_for_step: Step whose commit it waits for.
        waits_for_offer: It waits for what it could resume from.
        waits_until_settled: That is to include what becomes of shares that are being saved.
        unsent: Messages for which its socket has had no room yet.
    """

    sock: socket.socket
    is_monitor: bool = False
    local_rank: int | None = None
    local_world_size: int = 1
    attempt: int = -1
    stage: str = ""
    sent_arenas: set[int] = field(default_factory=set)
    waits_for_arena: Message | None = None
    waits_for_step: int | None = None
    waits_for_offer: bool = False
    waits_until_settled: bool = False
    unsent: deque[Message] = field(default_factory=deque)


class Waitable(Protocol):
    """Something whose descriptor an event loop waits for."""

    def fileno(self) -> int:
        """Return the descriptor."""


class Connections:
    """Accepts processes, and receives and sends their messages; none of it blocks but `poll`."""

    def __init__(self, listener: socket.socket, wake_up: Waitable, on_abandoned: Callable[[], None]) -> None:
        """Create an empty set of connections.

        Args:
            listener: Listening socket.
            wake_up: Ends `poll` when it becomes readable.
            on_abandoned: Called when the last monitor has disconnected.
        """
        self._listener, self._on_abandoned = listener, on_abandoned
        self._clients: dict[socket.socket, Client] = {}
        self._had_monitor = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(wake_up, selectors.EVENT_READ)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._clients.values()))

    @property
    def has_monitor(self) -> bool:
        """Whether a monitor is connected."""
        return any(client.is_monitor for client in self._clients.values())

    def add_monitor(self, client: Client) -> None:
        """Make a client a monitor."""
        client.is_monitor = self._had_monitor = True

    def poll(self, timeout_s: float | None = None) -> Iterator[tuple[Client, Message]]:
        """Wait until something happens, and yield the messages that have come, one of each client."""
        for key, ready in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            # A client may have been disconnected since, by the answer to another one's message.
            client = self._clients.get(key.fileobj)  # type: ignore[call-overload]
            if client is not None and ready & selectors.EVENT_WRITE:
                self._send_unsent(client)
            message = self._receive(client) if client is not None and ready & selectors.EVENT_READ else None
            if client is not None and message is not None:
                yield client, message

    def unread_of_ranks(self) -> Iterator[tuple[Client, Message]]:
        """Yield all messages of ranks that can be read now."""
        for client in self:
            while not client.is_monitor and (message := self._receive(client)) is not None:
                yield client, message

    def send(self, client: Client, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message; a client that cannot take it is disconnected, but a monitor only if it lacks thousands."""
        if client.sock not in self._clients:
            return
        if client.unsent:
            self._keep_unsent(client, message)
            return
        try:
            protocol.send(client.sock, message, fds)
        except BlockingIOError:
            if client.is_monitor and not fds:
                self._keep_unsent(client, message)
            else:
                self._disconnect(client)
        except OSError:
            self._disconnect(client)

    def send_to_monitors(self, message: Message) -> None:
        """Send a message to every monitor."""
        for client in self:
            if client.is_monitor:
                self.send(client, message)

    def close(self) -> None:
        """Give monitors some time for what they have not read, and stop waiting for anything.

        The sockets stay open until the process ends.
        """
        deadline = time.monotonic() + _LAST_S
        while any(client.unsent for client in self) and (left := deadline - time.monotonic()) > 0:
            for _ in self.poll(left):
                pass
        self._selector.close()

    def _keep_unsent(self, client: Client, message: Message) -> None:
        client.unsent.append(message)
        if len(client.unsent) > _MAX_UNSENT:
            self._disconnect(client)
        elif len(client.unsent) == 1:
            self._selector.modify(client.sock, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _send_unsent(self, client: Client) -> None:
        try:
            while client.unsent:
                protocol.send(client.sock, client.unsent[0])
                client.unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._disconnect(client)
            return
        self._selector.modify(client.sock, selectors.EVENT_READ)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._clients[sock] = Client(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, client: Client) -> Message | None:
        if client.sock not in self._clients:
            return None
        try:
            message, fds = protocol.receive(client.sock)
        except BlockingIOError:
            return None
        except OSError:
            self._disconnect(client)
            return None
        for fd in fds:
            os.close(fd)
        return message

    def _disconnect(self, client: Client) -> None:
        del self._clients[client.sock]
        self._selector.unregister(client.sock)
        client.sock.close()
        client.unsent.clear()
        if self._had_monitor and not self.has_monitor:
            self._on_abandoned()
