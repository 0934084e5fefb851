"""One connection between two nodes: the handshake, lines of JSON with their codes, keepalives."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from runner.peers.auth import MAX_HANDSHAKE_BYTES, PeerAuth, WrongSecret
from runner.peers.messages import PeerMessage, Ping
from runner.system.event_loop import EventLoop

M = TypeVar("M", bound=PeerMessage)
PING_INTERVAL_S = 1.0
# A runner that is hung, or stopped, answers nothing while its kernel does.
SILENCE_S = 10.0
# A kernel that is cut off, or gone, acknowledges nothing. Load does not delay it, so that this can be short (tcp(7)).
UNACKNOWLEDGED_S = 4.0
# `struct tcp_info` of linux/tcp.h up to tcpi_last_ack_recv, in milliseconds.
_TCP_INFO = struct.Struct("8x13I")
HANDSHAKE_TIMEOUT_S = 5.0
_MAX_LINE_BYTES = 1 << 20
# Seconds between two checks after which this process was itself stopped, and must not blame others for their silence.
_GAP_S = 3.0


class Connection(Generic[M]):
    """One established connection.

    Attributes:
        num_heard: Times that the other side was heard.
        lost: Whether the connection has been closed, by either side.
        wrong_secret: Whether the reason is that the other side has another secret.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        auth: PeerAuth,
        read: Callable[[bytes], M],
        receive: Callable[[Connection[M], M], None],
    ) -> None:
        """Begin to read from a connected socket, which the connection closes.

        Args:
            sock: The socket.
            loop: Calls `receive`.
            auth: This side of the handshake.
            read: Parses a line; raises ValueError if it is not a message.
            receive: Called in the loop for every message except keepalives.
        """
        sock.setblocking(False)
        _set_options(sock)
        self._sock, self._loop, self._read_line, self._receive = sock, loop, read, receive
        self._auth = auth
        self._buffer = b""
        self._unsent = auth.opening()
        # Messages that wait for the end of the handshake.
        self._unsealed: list[PeerMessage] = []
        self._heard_at = self._pinged_at = self._checked_at = self._began_at = time.monotonic()
        # Unlike `_heard_at`, it does not move when this process itself was stopped.
        self.num_heard = 0
        self.lost = self.wrong_secret = False
        loop.register(sock, lambda _: self._read())
        self._flush()

    @property
    def is_stranger(self) -> bool:
        """Whether the other side has not yet proved that it belongs to the run."""
        return not self._auth.done

    def send(self, message: PeerMessage) -> None:
        """Send a message; a side that does not read counts as lost because it is silent."""
        if self.lost:
            return
        if self.is_stranger:
            self._unsealed.append(message)
            return
        self._unsent += self._auth.seal(message.encode().rstrip(b"\n")) + b"\n"
        self._flush()

    def check(self) -> None:
        """Send a keepalive, and check for the other side's; called about twice per second."""
        now = time.monotonic()
        gap, self._checked_at = now - self._checked_at, now
        if gap > _GAP_S:
            # Data that has arrived meanwhile is read before the other side counts as silent.
            self._heard_at += gap
            self._began_at += gap
        if self.lost:
            return
        is_silent = now - self._heard_at > SILENCE_S or _unacknowledged_s(self._sock) > UNACKNOWLEDGED_S
        if is_silent or (self.is_stranger and now - self._began_at > HANDSHAKE_TIMEOUT_S):
            self.close()
        elif now - self._pinged_at >= PING_INTERVAL_S and not self.is_stranger:
            self._pinged_at = now
            self.send(Ping())
        else:
            self._flush()

    def close(self) -> None:
        """Close the connection."""
        if not self.lost:
            self.lost = True
            self._loop.unregister(self._sock)
            self._sock.close()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most `timeout_s` seconds."""
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
        if not data:
            self.close()
            return
        self._heard_at = time.monotonic()
        self.num_heard += 1
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            for line in lines:
                self._take(line)
            if len(self._buffer) > (MAX_HANDSHAKE_BYTES if self.is_stranger else _MAX_LINE_BYTES):
                raise ValueError("a line without an end")
        except WrongSecret:
            self.wrong_secret = True
            self.close()
        except ValueError:
            # Something else has connected to the port.
            self.close()

    def _take(self, line: bytes) -> None:
        if self.lost:
            return
        if self.is_stranger:
            self._unsent += self._auth.answer(line)
            if not self.is_stranger:
                waiting, self._unsealed = self._unsealed, []
                for message in waiting:
                    self.send(message)
            self._flush()
            return
        message = self._read_line(self._auth.open(line))
        if not isinstance(message, Ping):
            self._receive(self, message)


def _set_options(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Also while this process is stopped, its kernel asks the other one every second.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def _unacknowledged_s(sock: socket.socket) -> float:
    """Return the seconds since the other kernel acknowledged something; 0 if that is unknown.

    It is asked for here, as TCP_USER_TIMEOUT took up to 8 s where the own network was down.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0.0
    return float(_TCP_INFO.unpack(info)[-1]) / 1000 if len(info) == _TCP_INFO.size else 0.0
