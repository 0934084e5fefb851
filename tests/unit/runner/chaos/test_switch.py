"""Which frames of whom arrive where, and when."""

from __future__ import annotations

import random

from runner.chaos.switch import Switch, Wire, mac_of

BROADCAST = b"\xff" * 6


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
