from __future__ import annotations

import socket

import pytest
from infra import ports


def test_the_kernel_gives_them_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        found = ports.free_ports(50)
        assert len(set(found)) == 50 and all(port > 1024 and port + 1 < ports._EPHEMERAL for port in found)
        shares.append({port + one for port in found for one in (0, 1)})
    assert not shares[0] & shares[1]


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port()
    monkeypatch.setattr("random.SystemRandom", lambda: FromOne(first))
    with socket.create_server(("", first + 1)):
        assert ports.free_port() > first + 1


class FromOne:
    """Draws ports in order, from one on."""

    def __init__(self, first: int) -> None:
        self._first = first

    def sample(self, population: range, number: int) -> list[int]:
        del population
        return [self._first + 2 * index for index in range(number)]
