"""Connections between the runners of one run's nodes: messages over one TCP connection from each to the leader.

The leader, one node's runner, begins and ends attempts and the run; the others report how attempts ended on their
nodes. Both sides send a keepalive every second. A side that is hung counts as lost after ten seconds without one, a
side that is dead or cut off after four seconds in which its kernel has acknowledged nothing. No call blocks, except up
to 0.1 s for the resolution of a name.

Before anything else both sides prove that they know the run's secret (`auth.py`). A side that has not done so is a
stranger: there may be `MAX_STRANGERS` of them, each for five seconds and with a line of 256 bytes at most.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import CheckpointError
from runner.errors import ExitCode
from runner.peers import connection as peer_connection
from runner.peers.auth import PeerAuth
from runner.peers.connection import SILENCE_S, Connection
from runner.peers.messages import (
    Finish,
    Hello,
    PeerMessage,
    ToLeader,
    ToMember,
    read_by_leader,
    read_by_member,
)
from runner.system.event_loop import EventLoop
from runner.system.sockets import listening

MAX_STRANGERS = 64
# Keepalives after which the old connection of a node has delivered what was on its way when a second one was opened.
_SETTLING_PINGS = 3
# Between two attempts of a member to connect.
_RETRY_S = 0.5


@dataclass
class _Claim:
    """A second connection for a node rank, and what the first one had delivered."""

    claimant: Connection[ToLeader]
    hello: Hello
    # One more word than this from the first connection means that both nodes live.
    num_heard: int
    # Until then (monotonic seconds) such a word may have been on its way.
    settled_at: float


class Leader:
    """The leader's side: listens, and knows which nodes are connected."""

    def __init__(
        self,
        address: tuple[str, int],
        num_nodes: int | None,
        loop: EventLoop,
        receive: Callable[[int, ToLeader], None],
        refusal: Callable[[Hello], Finish | None] = lambda hello: None,
        *,
        secret: bytes,
        own: int = 0,
        bind: str | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Listen on the port.

        Args:
            address: Host and port; only the port is used.
            num_nodes: Nodes of the run; the others have node ranks below this. None if there may be spares, with any
                node rank.
            loop: Calls the other arguments.
            receive: Called with a node rank and its message.
            refusal: Returns how the sender of a hello is to end that is not admitted; None if it is.
            secret: Of the run.
            own: Node rank of this node.
            bind: Address of this node to listen on; None for all.
            warn: Called with a line about a host that has another secret, once for each of at most `MAX_STRANGERS`.

        Raises:
            OSError: The port is taken, or this node does not have the address.
        """
        self._loop, self._receive, self._refusal, self._num_nodes = loop, receive, refusal, num_nodes
        self._own = own
        self._secret, self._warn = secret, warn
        self._warned: set[str] = set()
        self._connections: dict[int, Connection[ToLeader]] = {}
        self._sessions: dict[int, str] = {}
        # A second connection for a node rank that is connected already: either the first one is dead, or two nodes have
        # the same rank.
        self._claims: dict[int, _Claim] = {}
        # Until their hello.
        self._strangers: list[tuple[Connection[ToLeader], str]] = []
        self._listener = listening(bind, address[1])
        self._listener.setblocking(False)
        loop.register(self._listener, lambda _: self._accept())

    @property
    def present(self) -> set[int]:
        """Node ranks of the nodes that are connected."""
        return {number for number, connection in self._connections.items() if not connection.lost}

    def send(self, message: PeerMessage, number: int | None = None) -> None:
        """Send a message to one node, or to all that are connected."""
        for other, connection in list(self._connections.items()):
            if number in (None, other):
                connection.send(message)

    def check(self) -> None:
        """Exchange keepalives; called about twice per second."""
        for connection in self._all():
            connection.check()
        for stranger, host in self._strangers:
            if stranger.wrong_secret:
                self._warn_once(host)
        self._strangers = [(stranger, host) for stranger, host in self._strangers if not stranger.lost]
        for number, claim in list(self._claims.items()):
            known, claimant = self._connections[number], claim.claimant
            if time.monotonic() < claim.settled_at:
                claim.num_heard = known.num_heard
            if not (claimant.lost or known.lost or known.num_heard > claim.num_heard):
                continue
            del self._claims[number]
            if claimant.lost:
                continue
            if known.lost:
                self._admit(number, claimant, claim.hello)
            else:
                self._refuse(
                    claimant, f"node rank {number} is taken by a live node; give each node its own --node-rank"
                )

    def close(self) -> None:
        """Send what is left, then close all connections and the port."""
        for connection in self._connections.values():
            connection.drain(2.0)
        for connection in self._all():
            connection.close()
        self._loop.unregister(self._listener)
        self._listener.close()

    def _all(self) -> list[Connection[ToLeader]]:
        return [*self._connections.values(), *(stranger for stranger, _ in self._strangers)]

    def _warn_once(self, host: str) -> None:
        if host not in self._warned and len(self._warned) < MAX_STRANGERS:
            self._warned.add(host)
            self._warn(
                f"refused a connection from {host}: it has another secret than this run; nodes of one run have the "
                "same checkpoint.location, or the same RUNNER_SECRET"
            )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, address = self._listener.accept()
            auth = PeerAuth(self._secret, "leader")
            connection = Connection(sock, self._loop, auth, read_by_leader, self._on_message)
            self._strangers.append((connection, address[0].removeprefix("::ffff:")))
            if len(self._strangers) > MAX_STRANGERS:
                self._strangers.pop(0)[0].close()

    def _on_message(self, connection: Connection[ToLeader], message: ToLeader) -> None:
        number = next((n for n, known in self._connections.items() if known is connection), None)
        if number is not None:
            self._receive(number, message)
        elif isinstance(message, Hello):
            self._on_hello(connection, message)
        else:
            connection.close()

    def _on_hello(self, connection: Connection[ToLeader], hello: Hello) -> None:
        number = hello.node_rank
        if number == self._own or (self._num_nodes is not None and number >= self._num_nodes):
            which = f"one of the {self._num_nodes} nodes" if self._num_nodes is not None else "free: the leader has it"
            self._refuse(connection, f"node rank {number} is not {which} (--nnodes)")
        elif (end := self._refusal(hello)) is not None:
            connection.send(end)
        elif hello.session and hello.session == self._sessions.get(number):
            # It was cut off. What it had sent before may arrive yet, in the old connection.
            self._connections[number].close()
            self._admit(number, connection, hello)
        elif number in self._claims and not self._claims[number].claimant.lost:
            self._refuse(connection, f"several nodes have node rank {number}; give each node its own --node-rank")
        elif number in self._connections and not self._connections[number].lost:
            # The node has reconnected before its old connection timed out, or two nodes have the same rank.
            settled_at = time.monotonic() + _SETTLING_PINGS * peer_connection.PING_INTERVAL_S
            self._claims[number] = _Claim(connection, hello, self._connections[number].num_heard, settled_at)
        else:
            self._admit(number, connection, hello)

    def _admit(self, number: int, connection: Connection[ToLeader], hello: Hello) -> None:
        self._strangers = [pair for pair in self._strangers if pair[0] is not connection]
        self._connections[number], self._sessions[number] = connection, hello.session
        self._receive(number, hello)

    def _refuse(self, connection: Connection[ToLeader], reason: str) -> None:
        # The node exits when it has read this. If it does not, its connection is closed for its silence.
        connection.send(Finish(exit_code=ExitCode.USAGE.value, reason=reason))


@dataclass(frozen=True)
class _Route:
    """How a leader, whose host and port were given as `address`, can be reached."""

    address: tuple[str, int]
    family: int
    # The host's address and the port, as `socket.connect` takes them.
    resolved: Any
    secret: bytes


class Member:
    """The side of every other node: connects, and reconnects.

    Attributes:
        address: Host and port of the leader.
        own_host: Address of this node on its newest connection; None before the first one.
        last_error: Why the leader cannot be reached.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Hello,
        loop: EventLoop,
        receive: Callable[[ToMember], None],
        *,
        read_secret: Callable[[], bytes | None],
    ) -> None:
        """Prepare to connect; `check` does.

        Args:
            address: Host and port of the leader.
            hello: Sent on every new connection.
            loop: Calls `receive`.
            receive: Called with every message of the leader.
            read_secret: Returns the run's secret; None if there is none yet. Called in a thread before each attempt to
                connect; may raise OSError.
        """
        self._read_secret = read_secret
        self._route: _Route | None = None
        self.address, self._loop, self._receive = address, loop, receive
        self._hello = hello.model_copy(update={"session": uuid.uuid4().hex})
        self._connection: Connection[ToMember] | None = None
        self._connecting: socket.socket | None = None
        self._connecting_secret = b""
        self._try_at = 0.0
        self._give_up_at = 0.0
        self._closed = False
        self._resolver: threading.Thread | None = None
        self.own_host: str | None = None
        self.last_error = "no answer"

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the leader."""
        return self._connection is not None and not self._connection.lost and not self._connection.is_stranger

    def follow(self, address: tuple[str, int]) -> None:
        """Connect to another leader from now on; one that is connected is kept until it is lost."""
        if address != self.address:
            self.address, self._route, self._resolver = address, None, None
            # The leader that is lost may answer yet.
            self._stop_connecting()

    def send(self, message: PeerMessage) -> None:
        """Send a message, if there is a connection."""
        if self._connection is not None:
            self._connection.send(message)

    def check(self) -> None:
        """Exchange keepalives, or try to connect; called about twice per second."""
        if self._connection is not None:
            self._connection.check()
            if not self._connection.lost:
                return
            if self._connection.is_stranger:
                # Perhaps it has a new one.
                self._route = None
                self.last_error = (
                    "it ended the handshake; all nodes need the same checkpoint.location, or the same RUNNER_SECRET"
                )
        if self._closed:
            return
        self._connection = None
        now = time.monotonic()
        if self._connecting is None:
            if now >= self._try_at:
                self._try_at = now + _RETRY_S
                self._begin_connecting(now)
            return
        error = self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._fail(error)
        elif _is_through(self._connecting):
            sock, self._connecting = self._connecting, None
            self.own_host = sock.getsockname()[0]
            auth = PeerAuth(self._connecting_secret, "member")
            self._connection = Connection(
                sock, self._loop, auth, read_by_member, lambda _, message: self._receive(message)
            )
            self._connection.send(self._hello)
        elif now > self._give_up_at:
            self._fail(errno.ETIMEDOUT)

    def close(self) -> None:
        """Send what is left, and close; `check` does nothing from then on."""
        self._closed = True
        if self._connection is not None:
            self._connection.drain(2.0)
            self._connection.close()
        self._stop_connecting()

    def _stop_connecting(self) -> None:
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _resolve(self, address: tuple[str, int], secret: bytes | None) -> None:
        # This runs in a thread, as a name server or a storage that does not answer blocks for long.
        try:
            secret = secret or self._read_secret()
        except (OSError, CheckpointError) as error:
            self.last_error = f"the run's secret cannot be read: {error}"
            return
        if secret is None:
            self.last_error = (
                "the first node has not written this run's secret to checkpoint.location; all nodes need the same "
                "location, or the same RUNNER_SECRET"
            )
            return
        try:
            family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            self._route = _Route(address, family, resolved, secret)
        except (OSError, UnicodeError) as error:
            self.last_error = f"{address[0]}: {getattr(error, 'strerror', None) or error}"

    def _begin_connecting(self, now: float) -> None:
        if self._resolver is None or not self._resolver.is_alive():
            secret = self._route.secret if self._route is not None else None
            self._resolver = threading.Thread(
                target=self._resolve, args=(self.address, secret), name="resolver", daemon=True
            )
            self._resolver.start()
            self._resolver.join(0.1)
        route = self._route
        if route is None or route.address != self.address:
            # It was found for the leader before.
            self._route = None
            return
        try:
            sock = socket.socket(route.family, socket.SOCK_STREAM)
            sock.setblocking(False)
            code = sock.connect_ex(route.resolved)
        except OSError as error:
            self.last_error = error.strerror or str(error)
            return
        self._connecting, self._give_up_at = sock, now + SILENCE_S
        self._connecting_secret = route.secret
        if code not in (0, errno.EINPROGRESS):
            self._fail(code)

    def _fail(self, code: int) -> None:
        self.last_error = os.strerror(code)
        self._stop_connecting()


def _is_through(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
