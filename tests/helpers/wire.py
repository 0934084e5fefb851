"""The wires between machines that are network namespaces, and how they are cut; fixtures for all tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from infra.parts import lacks, require

from runner.chaos.network import Network, NoNetwork, Wire

NUM_HOSTS = 3


@pytest.fixture(scope="module")
def wire() -> Iterator[Network]:
    """Set up the hosts and their network."""
    require("network namespaces")
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(NUM_HOSTS))
        except NoNetwork as error:
            lacks("network namespaces", error)
        yield network


@pytest.fixture
def cut(wire: Network) -> Iterator[Cut]:
    cut = Cut(wire)
    yield cut
    cut.restore()


class Cut:
    """The wire of one machine, by default of the second one."""

    def __init__(self, network: Network) -> None:
        self._network, self._number = network, 1

    def now(self, number: int = 1) -> None:
        self._number = number
        self._network.set_wires(number, Wire(cut=True))

    def restore(self) -> None:
        self._network.set_wires(self._number, Wire())
