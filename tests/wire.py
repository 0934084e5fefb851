"""The wire between two machines that are network namespaces, and how it is cut; fixtures for all tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from infra.namespaces import hosts, set_cable
from infra.parts import lacks, require


@pytest.fixture(scope="module")
def wire() -> Iterator[None]:
    """Set up the hosts of `infra.namespaces`."""
    require("network namespaces")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hosts())
        except RuntimeError as error:
            lacks("network namespaces", error)
        yield


@pytest.fixture
def cut(wire: None) -> Iterator[Cut]:
    cut = Cut()
    yield cut
    cut.restore()


class Cut:
    """The wire of one machine, by default of the second one."""

    def __init__(self) -> None:
        self._number = 1

    def now(self, number: int = 1) -> None:
        self._number = number
        set_cable(number, plugged=False)

    def restore(self) -> None:
        set_cable(self._number, plugged=True)
