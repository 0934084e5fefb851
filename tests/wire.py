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
    """The wire of the second machine."""

    def now(self) -> None:
        set_cable(1, plugged=False)

    def restore(self) -> None:
        set_cable(1, plugged=True)
