"""A network switch in user space, whose wires can be cut in one direction or both, delayed, or made to lose frames.

    python -m runner.chaos.switch FD FD …

The arguments are descriptors of TAP devices (tap(4)), one per host. Standard input has one JSON object per line:
`{"from": 0, "to": 1, "cut": true, "delay_s": 0.1, "loss": 0.05}` changes what happens to frames from host 0 to host 1.
The program ends when standard input does. The kernel's own emulator (netem) is missing in many containers' kernels.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

# The largest frame: an interface's maximum transmission unit, and the Ethernet header.
_MAX_FRAME = 65536 + 18
# Frames that wait for their delay; a real switch drops what its buffers cannot hold.
_MAX_WAITING = 10_000


@dataclass(frozen=True)
class Wire:
    """What happens to frames in one direction.

    Attributes:
        cut: None arrives.
        delay_s: Seconds by which they are late.
        loss: Share that is lost, from 0 to 1.
    """

    cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0


def mac_of(host: int) -> bytes:
    """Return the hardware address of a host, by its number; locally administered."""
    return bytes((2, 0, 0, 0, host >> 8, host & 255))


class Switch:
    """Decides which frame goes where, and when. Sends nothing itself."""

    def __init__(self, num_hosts: int, dice: random.Random | None = None) -> None:
        """Connect all hosts.

        Args:
            num_hosts: Number of hosts.
            dice: Decides which frames are lost.
        """
        self._num_hosts, self._dice = num_hosts, dice or random.Random()
        self._wires: dict[tuple[int, int], Wire] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def set(self, source: int, target: int, wire: Wire) -> None:
        """Change what happens to frames from one host to another."""
        self._wires[source, target] = wire

    def take(self, source: int, frame: bytes, now: float) -> None:
        """Take in a frame that a host has sent.

        Args:
            source: Number of the host.
            frame: The frame; a broadcast goes to all others.
            now: Monotonic seconds.
        """
        for target in range(self._num_hosts):
            if target == source or not (frame[0] & 1 or frame[:6] == mac_of(target)):
                continue
            wire = self._wires.get((source, target), Wire())
            if wire.cut or (wire.loss and self._dice.random() < wire.loss) or len(self._waiting) >= _MAX_WAITING:
                continue
            self._number += 1
            heapq.heappush(self._waiting, (now + wire.delay_s, self._number, target, frame))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Return the frames that are to be delivered now, in order, with the number of the host each is for."""
        found = []
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._waiting)
            found.append((target, frame))
        return found

    def next_s(self, now: float) -> float | None:
        """Return the seconds until the next frame is due; None if none waits."""
        return max(self._waiting[0][0] - now, 0.0) if self._waiting else None


def main(taps: Sequence[int]) -> None:
    """Switch frames between TAP devices until standard input ends."""
    switch = Switch(len(taps))
    selector = selectors.DefaultSelector()
    for host, tap in enumerate(taps):
        os.set_blocking(tap, False)
        selector.register(tap, selectors.EVENT_READ, host)
    selector.register(0, selectors.EVENT_READ, None)
    orders = b""
    while True:
        for key, _ in selector.select(switch.next_s(time.monotonic())):
            if key.data is None:
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, orders = (orders + data).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    switch.set(order.pop("from"), order.pop("to"), Wire(**order))
            else:
                _take_frames(switch, key.data, key.fd)
        for target, frame in switch.due(time.monotonic()):
            # The host's interface may be down, or its queue full: as on a real wire, the frame is lost.
            with contextlib.suppress(OSError):
                os.write(taps[target], frame)


def _take_frames(switch: Switch, host: int, tap: int) -> None:
    # Several at once: one call for each wait would halve the throughput.
    for _ in range(64):
        try:
            frame = os.read(tap, _MAX_FRAME)
        except OSError:
            return
        switch.take(host, frame, time.monotonic())


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
