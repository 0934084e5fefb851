"""Messages between the processes of a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.agent import protocol


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("number", [1, 20_000], ids=["short", "of a thousand ranks"])
def test_a_message_of_any_size_arrives_with_its_descriptors(
    number: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    """The list of files of 400 ranks was longer than a packet may be, which ended the agent."""
    message = {"files": [[f"rng_state_{rank}.pth", rank, 4096] for rank in range(number)]}
    reader, writer = os.pipe()
    before = num_descriptors()
    protocol.send(pair[0], message, (writer,))
    found, (received,) = protocol.receive(pair[1])
    assert found == message
    os.write(received, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(received)
    # Nothing else is left open (and garbage of other tests may be gone meanwhile).
    assert num_descriptors() <= before
    os.close(reader)
    os.close(writer)


def test_the_end_of_the_peer_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        protocol.receive(pair[1])
