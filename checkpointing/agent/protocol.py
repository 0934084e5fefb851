"""Messages between processes of one node: one JSON object per packet of a Unix SEQPACKET socket, with descriptors.

SEQPACKET keeps message boundaries and order, reports the end of the peer, and carries descriptors (unix(7)).
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

# Longer messages, such as lists of the files of a thousand ranks, are sent as a descriptor of memory.
MAX_MESSAGE_BYTES = 128 * 1024
_IN_MEMORY = "in_memory"
_MAX_FDS = 16

Message = dict[str, Any]


class Refusal(Enum):
    """Why there is no arena for a step."""

    BUSY = auto()
    NO_MEMORY = auto()


@dataclass(frozen=True)
class Guest:
    """A copy of another node's shard in an arena: its name, place, size in bytes and digest."""

    name: str
    offset: int
    nbytes: int
    digest: str


# What a monitor's requests are answered with, under `event`; everything else that it receives is an event of
# `checkpointing.agent.events`.
ATTEMPT_BEGUN = "attempt_begun"
ATTEMPT_OVER = "attempt_over"
PONG = "pong"


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one message.

    Raises:
        OSError: The peer is gone.
    """
    data = json.dumps(message).encode()
    if len(data) <= MAX_MESSAGE_BYTES:
        socket.send_fds(sock, [data], list(fds))
        return
    with os.fdopen(os.memfd_create("checkpoint-message", os.MFD_CLOEXEC), "wb") as memory:
        memory.write(data)
        memory.flush()
        socket.send_fds(sock, [json.dumps({_IN_MEMORY: len(data)}).encode()], [*fds, memory.fileno()])


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message and its descriptors, which the caller owns.

    Raises:
        ConnectionError: The peer is gone.
    """
    data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, _MAX_FDS)
    if not data:
        raise ConnectionResetError("the peer closed the connection")
    message: Message = json.loads(data)
    if _IN_MEMORY in message:
        with os.fdopen(fds.pop(), "rb") as memory:
            # Sender and receiver share the descriptor's position.
            message = json.loads(os.pread(memory.fileno(), message[_IN_MEMORY], 0))
    return message, fds


def listen(path: str) -> socket.socket:
    """Return a listening socket at a path of at most 107 bytes."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    sock.listen(128)
    return sock


def connect(path: str, timeout_s: float | None = None) -> socket.socket:
    """Connect to a listening socket.

    Raises:
        OSError: No process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout_s)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
