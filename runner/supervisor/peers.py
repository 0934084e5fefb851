"""How the runners of a run's machines talk: lines of JSON over one TCP connection from each to the first machine's.

The first machine's runner leads: it says when an attempt begins, when it is over, and when and how the run ends; the
others say how it went with them. Both sides send a sign of life every two seconds; ten seconds without one, and the
other side counts as lost, whether it is dead, hung or cut off. No call here blocks, but for looking a name up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from runner.errors import ExitCode
from runner.supervisor.peer_messages import Message, read_by_leader, read_by_member
from runner.system.event_loop import EventLoop

PING_INTERVAL_S = 2.0
SILENCE_S = 10.0
_MAX_LINE_BYTES = 1 << 20
# Connections that have not said who they are.
_MAX_STRANGERS = 64
# Whoever was stopped himself for longer than this must not blame others for their silence.
_GAP_S = 3.0


class Connection:
    """One established connection. `lost` is true once it has been closed, by whomever."""

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        read: Callable[[bytes], Message],
        receive: Callable[[Connection, Message], None],
    ) -> None:
        """
        Args:
            read: makes a message of a line; raises ValueError for what is none.
            receive: called in the loop for every message but signs of life.
        """
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._loop, self._read_line, self._receive = sock, loop, read, receive
        self._buffer = b""
        self._unsent = b""
        self._heard_at = self._pinged_at = self._checked_at = time.monotonic()
        # Times that the other side was heard: unlike `_heard_at`, not moved on where this process was stopped itself.
        self.num_heard = 0
        self.lost = False
        loop.register(sock, lambda _: self._read())

    def send(self, message: Message) -> None:
        """Hand a message over; a connection that does not take it counts as lost by its silence."""
        if self.lost:
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def check(self) -> None:
        """Give a sign of life, and see whether the other side does; to be called about twice a second."""
        now = time.monotonic()
        gap, self._checked_at = now - self._checked_at, now
        if gap > _GAP_S:
            # What has come meanwhile is read before anybody is blamed.
            self._heard_at += gap
        if self.lost:
            return
        if now - self._heard_at > SILENCE_S:
            self.close()
        elif now - self._pinged_at >= PING_INTERVAL_S:
            self._pinged_at = now
            self.send({"do": "ping"})
        else:
            self._flush()

    def close(self) -> None:
        if not self.lost:
            self.lost = True
            self._loop.unregister(self._sock)
            self._sock.close()

    def drain(self, timeout_s: float) -> None:
        """Wait until what was sent is handed over; not longer."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and not self.lost and time.monotonic() < deadline:
            self._loop.pump(0.02)
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._buffer += data
        if not data or len(self._buffer) > _MAX_LINE_BYTES:
            self.close()
            return
        self._heard_at = time.monotonic()
        self.num_heard += 1
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            try:
                message = self._read_line(line)
            except ValueError:
                # Not one of ours: somebody else has found the port.
                self.close()
                return
            if message["do"] != "ping" and not self.lost:
                self._receive(self, message)


class Leader:
    """The first machine's side: listens, and knows who is there."""

    def __init__(
        self,
        address: tuple[str, int],
        num_nodes: int,
        loop: EventLoop,
        receive: Callable[[int, Message], None],
        refusal: Callable[[Message], str | None] = lambda hello: None,
    ) -> None:
        """Listen on the port, on all of this machine's addresses.

        Args:
            num_nodes: of the run; the others are 1 to num_nodes - 1.
            receive: called with a machine's number and its message.
            refusal: why the sender of a `hello` is not taken in; None where it is.

        Raises:
            OSError: the port is taken.
        """
        self._loop, self._receive, self._refusal, self._num_nodes = loop, receive, refusal, num_nodes
        self._connections: dict[int, Connection] = {}
        # A second connection for a machine that is connected already, its hello, and `num_heard` of the first one then:
        # either that one is dead, or two machines have the same number.
        self._claims: dict[int, tuple[Connection, Message, int]] = {}
        self._strangers: list[Connection] = []
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", address[1]), family=family, dualstack_ipv6=family == socket.AF_INET6, reuse_port=False
        )
        self._listener.setblocking(False)
        loop.register(self._listener, lambda _: self._accept())

    @property
    def present(self) -> set[int]:
        """Numbers of the machines that are connected."""
        return {number for number, connection in self._connections.items() if not connection.lost}

    def send(self, message: Message, number: int | None = None) -> None:
        """Tell one machine, or all that are there."""
        for other, connection in list(self._connections.items()):
            if number in (None, other):
                connection.send(message)

    def check(self) -> None:
        """Signs of life; to be called about twice a second."""
        for connection in [*self._connections.values(), *self._strangers]:
            connection.check()
        self._strangers = [stranger for stranger in self._strangers if not stranger.lost]
        for number, (claimant, hello, num_heard) in list(self._claims.items()):
            known = self._connections[number]
            lives = known.num_heard > num_heard
            if not (claimant.lost or known.lost or lives):
                continue
            del self._claims[number]
            if claimant.lost:
                continue
            if known.lost:
                self._take_in(number, claimant, hello)
            else:
                self._refuse(
                    claimant, f"node rank {number} is taken by a live node; give each node its own --node-rank"
                )

    def close(self) -> None:
        for connection in self._connections.values():
            connection.drain(2.0)
        for connection in [*self._connections.values(), *self._strangers]:
            connection.close()
        self._loop.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._strangers.append(Connection(sock, self._loop, read_by_leader, self._on_message))
            if len(self._strangers) > _MAX_STRANGERS:
                self._strangers.pop(0).close()

    def _on_message(self, connection: Connection, message: Message) -> None:
        number = next((n for n, known in self._connections.items() if known is connection), None)
        if number is not None:
            self._receive(number, message)
        elif message["do"] == "hello":
            self._on_hello(connection, message)
        else:
            connection.close()

    def _on_hello(self, connection: Connection, hello: Message) -> None:
        number = hello["node_rank"]
        if not 0 < number < self._num_nodes:
            self._refuse(connection, f"node rank {number} is not one of the {self._num_nodes} machines' (--nnodes)")
        elif (reason := self._refusal(hello)) is not None:
            self._refuse(connection, reason)
        elif number in self._claims and not self._claims[number][0].lost:
            self._refuse(connection, f"several nodes say that they are node rank {number}; give each its own")
        elif number in self._connections and not self._connections[number].lost:
            # It has come back and its old connection is not known to be dead yet, or there are two of them.
            self._claims[number] = (connection, hello, self._connections[number].num_heard)
        else:
            self._take_in(number, connection, hello)

    def _take_in(self, number: int, connection: Connection, hello: Message) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
        self._connections[number] = connection
        self._receive(number, hello)

    def _refuse(self, connection: Connection, reason: str) -> None:
        """It ends by itself when it has read that; else by its silence, as any stranger."""
        connection.send({"do": "finish", "exit_code": int(ExitCode.USAGE), "reason": reason})


class Member:
    """Another machine's side: connects, and connects again."""

    def __init__(self, address: tuple[str, int], hello: Message, loop: EventLoop, receive: Callable[[Message], None]):
        self._address, self._hello, self._loop, self._receive = address, hello, loop, receive
        self._connection: Connection | None = None
        self._connecting: socket.socket | None = None
        self._try_at = 0.0
        self._give_up_at = 0.0
        self._closed = False
        self._resolver: threading.Thread | None = None
        # Family and address that the name had the last time that somebody knew it.
        self._resolved: tuple[int, Any] | None = None
        self.last_error = "nobody has answered"

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.lost

    def send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def check(self) -> None:
        """Signs of life; while there is no connection, tries to make one. To be called about twice a second."""
        if self._connection is not None:
            self._connection.check()
            if not self._connection.lost:
                return
        if self._closed:
            return
        self._connection = None
        now = time.monotonic()
        if self._connecting is None:
            if now >= self._try_at:
                self._try_at = now + 0.5
                self._begin_connecting(now)
            return
        error = self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._fail(error)
        elif self._is_through():
            sock, self._connecting = self._connecting, None
            self._connection = Connection(sock, self._loop, read_by_member, lambda _, message: self._receive(message))
            self._connection.send(self._hello)
        elif now > self._give_up_at:
            self._fail(errno.ETIMEDOUT)

    def close(self) -> None:
        """Hand over what was sent, and end; `check` does nothing from then on."""
        self._closed = True
        if self._connection is not None:
            self._connection.drain(2.0)
            self._connection.close()
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _resolve(self) -> None:
        """In a thread of its own: a name server that is cut off keeps one waiting."""
        try:
            family, _, _, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
            self._resolved = (family, address)
        except (OSError, UnicodeError) as error:
            self.last_error = f"{self._address[0]}: {getattr(error, 'strerror', None) or error}"

    def _begin_connecting(self, now: float) -> None:
        if self._resolver is None or not self._resolver.is_alive():
            self._resolver = threading.Thread(target=self._resolve, name="resolver", daemon=True)
            self._resolver.start()
            self._resolver.join(0.1)
        if self._resolved is None:
            return
        family, address = self._resolved
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            code = sock.connect_ex(address)
        except OSError as error:
            self.last_error = error.strerror or str(error)
            return
        self._connecting, self._give_up_at = sock, now + SILENCE_S
        if code not in (0, errno.EINPROGRESS):
            self._fail(code)

    def _is_through(self) -> bool:
        assert self._connecting is not None
        try:
            self._connecting.getpeername()
        except OSError:
            return False
        return True

    def _fail(self, code: int) -> None:
        assert self._connecting is not None
        self.last_error = os.strerror(code)
        self._connecting.close()
        self._connecting = None
