"""Hosts that are network namespaces of this machine, and a switch in user space between them.

The wires can be cut in one direction or both, delayed, or made to lose frames. The kernel's own emulator (netem) is
missing in many containers' kernels. The switch is a process of its own:

    python -m runner.chaos.network FD FD …

The arguments are descriptors of TAP devices (tap(4)), one per host. Standard input has one JSON object per line:
`{"from": 0, "to": 1, "cut": true, "delay_s": 0.1, "loss": 0.05}` changes what happens to frames from host 0 to host 1.
The program ends when standard input does.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from checkpointing.host.interpreter import module_command

# ioctl(2) of linux/if_tun.h: a TAP device without a header before each frame.
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MTU = 65000
_TIMEOUT_S = 20
# The largest frame: an interface's maximum transmission unit, and the Ethernet header.
_MAX_FRAME = 65536 + 18
# Frames that wait for their delay; a real switch drops what its buffers cannot hold.
_MAX_WAITING = 10_000


class NoNetwork(Exception):
    """This machine lets nobody make network namespaces; the text says why."""


@dataclass(frozen=True)
class Wire:
    """What happens to frames in one direction."""

    cut: bool = False  # None arrives.
    delay_s: float = 0.0  # Seconds by which they are late.
    loss: float = 0.0  # Share that is lost, from 0 to 1.


def address_of(host: int) -> str:
    """Return the address of a host, by its number."""
    return f"10.99.0.{host + 1}"


def inside(host: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one on a host of this process's network; it becomes that command."""
    return ["ip", "netns", "exec", _name_of(host), *command]


def _name_of(host: int) -> str:
    # Names are seen by all processes of the machine.
    return f"host-{host}-{os.getpid()}"


class Network:
    """Hosts with an address each, all connected; a context. A process has one at a time."""

    def __init__(self, num_hosts: int) -> None:
        """Prepare; the hosts, at most 200, are made on entry."""
        self._num_hosts = num_hosts
        self._taps: list[int] = []
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def set_wires(self, host: int, wire: Wire, *, inbound: bool = True, outbound: bool = True) -> None:
        """Change what happens to what a host is sent by all others (inbound), and to what it sends to them."""
        for other in range(self._num_hosts):
            if other != host and outbound:
                self._set_wire(host, other, wire)
            if other != host and inbound:
                self._set_wire(other, host, wire)

    def _set_wire(self, source: int, target: int, wire: Wire) -> None:
        assert self._switch is not None and self._switch.stdin is not None
        order = {"from": source, "to": target, **asdict(wire)}
        self._switch.stdin.write(json.dumps(order).encode() + b"\n")
        self._switch.stdin.flush()

    def _make(self) -> None:
        for number in range(self._num_hosts):
            name = _name_of(number)
            _ip("netns", "add", name)
            device = f"tap{number}-{os.getpid()}"[-15:]
            self._taps.append(_open_tap(device))
            _ip("link", "set", device, "address", mac_of(number).hex(":"), "mtu", str(_MTU))
            _ip("link", "set", device, "netns", name, "name", "eth0")
            _ip("-n", name, "addr", "add", f"{address_of(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        command = module_command("runner.chaos.network", *map(str, self._taps))
        self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=self._taps, start_new_session=True)

    def _remove(self) -> None:
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._switch.wait(_TIMEOUT_S)
        for tap in self._taps:
            os.close(tap)
        self._taps.clear()
        for number in range(self._num_hosts):
            with contextlib.suppress(NoNetwork):
                _ip("netns", "del", _name_of(number))


def _open_tap(name: str) -> int:
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NoNetwork(f"/dev/net/tun: {error.strerror}") from None
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError as error:
        os.close(fd)
        raise NoNetwork(f"a TAP device cannot be made: {error.strerror}") from None
    return fd


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise NoNetwork("the program `ip` is missing; install iproute2") from None
    if done.returncode:
        raise NoNetwork(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def mac_of(host: int) -> bytes:
    """Return the hardware address of a host, by its number; locally administered."""
    return bytes((2, 0, 0, 0, host >> 8, host & 255))


class Switch:
    """Decides which frame goes where, and when. Sends nothing itself."""

    def __init__(self, num_hosts: int, dice: random.Random | None = None) -> None:
        """Connect all hosts; `dice` decides which frames are lost."""
        self._num_hosts, self._dice = num_hosts, dice or random.Random()
        self._wires: dict[tuple[int, int], Wire] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def set(self, source: int, target: int, wire: Wire) -> None:
        """Change what happens to frames from one host to another."""
        self._wires[source, target] = wire

    def take(self, source: int, frame: bytes, now: float) -> None:
        """Take in a frame that a host has sent; a broadcast goes to all others. `now` is in monotonic seconds."""
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
