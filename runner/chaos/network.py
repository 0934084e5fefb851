"""Hosts that are network namespaces of this machine, and the wires between them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from runner.chaos.switch import Wire, mac_of

# ioctl(2) of linux/if_tun.h: a TAP device without a header before each frame.
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MTU = 65000
_TIMEOUT_S = 20


class NoNetwork(Exception):
    """This machine lets nobody make network namespaces; the text says why."""


def address_of(host: int) -> str:
    """Return the address of a host, by its number."""
    return f"10.99.0.{host + 1}"


def inside(host: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one on a host of this process's network; it becomes that command.

    Args:
        host: Number of the host.
        command: The other command.
    """
    return ["ip", "netns", "exec", _name_of(host), *command]


def _name_of(host: int) -> str:
    # Names are seen by all processes of the machine.
    return f"host-{host}-{os.getpid()}"


class Network:
    """Hosts with an address each, all connected; a context. A process has one at a time."""

    def __init__(self, num_hosts: int) -> None:
        """Prepare; the hosts are made on entry.

        Args:
            num_hosts: Number of hosts, at most 200.
        """
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def set_wire(self, source: int, target: int, wire: Wire) -> None:
        """Change what happens to what one host sends to another."""
        assert self._switch is not None and self._switch.stdin is not None
        order = {"from": source, "to": target, "cut": wire.cut, "delay_s": wire.delay_s, "loss": wire.loss}
        self._switch.stdin.write(json.dumps(order).encode() + b"\n")
        self._switch.stdin.flush()

    def set_wires(self, host: int, wire: Wire, *, inbound: bool = True, outbound: bool = True) -> None:
        """Change the wires between a host and all others.

        Args:
            host: Its number.
            wire: What happens from now on.
            inbound: Whether to what it is sent.
            outbound: Whether to what it sends.
        """
        for other in range(self._num_hosts):
            if other != host and outbound:
                self.set_wire(host, other, wire)
            if other != host and inbound:
                self.set_wire(other, host, wire)

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
        command = [sys.executable, "-m", "runner.chaos.switch", *map(str, self._taps)]
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
