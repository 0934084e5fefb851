from __future__ import annotations

import json
import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from runner.chaos.network import Network, NoNetwork, address_of, inside
from runner.chaos.switch import Wire


def test_a_command_runs_on_a_host() -> None:
    assert address_of(2) == "10.99.0.3"
    assert inside(2, ["true"]) == ["ip", "netns", "exec", f"host-2-{os.getpid()}", "true"]


def test_wires_are_set_in_the_directions_that_are_meant() -> None:
    network, orders = Network(3), list[dict[str, Any]]()
    stdin: Any = SimpleNamespace(write=lambda line: orders.append(json.loads(line)), flush=lambda: None)
    switch: Any = SimpleNamespace(stdin=stdin)
    network._switch = switch

    def pairs() -> set[tuple[int, int]]:
        found = {(order["from"], order["to"]) for order in orders if order["cut"]}
        orders.clear()
        return found

    network.set_wires(1, Wire(cut=True))
    assert pairs() == {(1, 0), (1, 2), (0, 1), (2, 1)}
    network.set_wires(1, Wire(cut=True), inbound=False)
    assert pairs() == {(1, 0), (1, 2)}
    network.set_wires(1, Wire(cut=True), outbound=False)
    assert pairs() == {(0, 1), (2, 1)}


def test_a_machine_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(command))
        return subprocess.CompletedProcess(command, 1, "", "Operation not permitted")

    monkeypatch.setattr("runner.chaos.network.subprocess.run", refuse)
    with pytest.raises(NoNetwork, match="Operation not permitted"), Network(2):
        pass
    assert asked[0].startswith("ip netns add host-0") and "netns del host-1" in asked[-1]

    def missing(command: list[str], **_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("runner.chaos.network.subprocess.run", missing)
    with pytest.raises(NoNetwork, match="install iproute2"), Network(2):
        pass
