"""Three hosts that are network namespaces, with the addresses 10.99.0.1 to 10.99.0.3, and a switch between them.

The switch is a bridge in a fourth namespace, so that a cable can be pulled while all hosts keep their interface.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.99.0.1", "10.99.0.2", "10.99.0.3")
# Their names are seen by all processes of the machine; several workers of `pytest -n` have hosts of their own.
HOSTS = tuple(f"host-{letter}-{os.getpid()}" for letter in "abc")
_SWITCH, _BRIDGE = f"switch-{os.getpid()}", "br-test"


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Make the hosts and their switch; nothing is added to the machine's own namespace.

    Raises:
        RuntimeError: the kernel refuses.
    """
    try:
        for name in (_SWITCH, *HOSTS):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", _SWITCH, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", _BRIDGE, "up")
        for number, (name, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
            # Both ends are made where they belong.
            ends = ["netns", _SWITCH, "type", "veth", "peer", "name", "eth0", "netns", name]
            _ip("link", "add", f"port-{number}", *ends)
            _ip("-n", _SWITCH, "link", "set", f"port-{number}", "master", _BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in (_SWITCH, *HOSTS):
            _ip("netns", "del", name, check=False)


def set_cable(number: int, plugged: bool) -> None:
    """Pull the cable of a host (its number, from 0) out of the switch, or plug it in again."""
    _ip("-n", _SWITCH, "link", "set", f"port-{number}", "up" if plugged else "down")
