"""Hosts on a network, and which frames of whom arrive where, and when."""

from __future__ import annotations

import json
import os
import random
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from runner.chaos.network import Network, NoNetwork, Switch, Wire, address_of, inside, mac_of

BROADCAST = b"\xff" * 6


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


def frame(target: int, text: bytes = b"") -> bytes:
    return mac_of(target) + mac_of(9) + text


def test_a_frame_goes_to_its_host_and_a_broadcast_to_all_others() -> None:
    switch = Switch(3)
    switch.take(0, frame(2), 1.0)
    switch.take(1, BROADCAST, 1.0)
    # A host's own, and one for nobody.
    switch.take(0, frame(0), 1.0)
    switch.take(0, frame(7), 1.0)
    assert switch.due(1.0) == [(2, frame(2)), (0, BROADCAST), (2, BROADCAST)]
    assert switch.next_s(1.0) is None


def test_a_wire_is_cut_in_one_direction_and_mended() -> None:
    switch = Switch(2)
    switch.set(0, 1, Wire(cut=True))
    switch.take(0, frame(1), 1.0)
    switch.take(1, frame(0), 1.0)
    assert switch.due(1.0) == [(0, frame(0))]
    switch.set(0, 1, Wire())
    switch.take(0, frame(1), 2.0)
    assert switch.due(2.0) == [(1, frame(1))]


def test_frames_are_late_and_stay_in_order() -> None:
    switch = Switch(2)
    switch.set(0, 1, Wire(delay_s=0.5))
    switch.take(0, frame(1, b"a"), 1.0)
    switch.take(0, frame(1, b"b"), 1.0)
    assert switch.due(1.4) == [] and switch.next_s(1.25) == 0.25
    assert [text[-1:] for _, text in switch.due(1.5)] == [b"a", b"b"]


def test_a_share_of_the_frames_is_lost() -> None:
    switch = Switch(2, random.Random(1))
    switch.set(0, 1, Wire(loss=0.25))
    for _ in range(1000):
        switch.take(0, frame(1), 1.0)
    assert 700 < len(switch.due(1.0)) < 800


def test_what_no_buffer_holds_is_dropped() -> None:
    switch = Switch(2)
    switch.set(0, 1, Wire(delay_s=1.0))
    for _ in range(10_001):
        switch.take(0, frame(1), 1.0)
    assert len(switch.due(3.0)) == 10_000
