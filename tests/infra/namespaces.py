"""Two hosts that are network namespaces: `na` (10.99.0.1) and `nb` (10.99.0.2), and a switch between them.

The switch is a bridge in a third namespace, so that a cable can be pulled while both hosts keep their interface.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

HOSTS = {"na": "10.99.0.1", "nb": "10.99.0.2"}
_SWITCH, _BRIDGE = "nsw", "br-test"


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Make both hosts and their switch; nothing is added to the machine's own namespace.

    Raises:
        RuntimeError: the kernel refuses.
    """
    try:
        for name in (_SWITCH, *HOSTS):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", _SWITCH, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", _BRIDGE, "up")
        for name, address in HOSTS.items():
            # Both ends are made where they belong.
            ends = ["netns", _SWITCH, "type", "veth", "peer", "name", "eth0", "netns", name]
            _ip("link", "add", f"v-{name}", *ends)
            _ip("-n", _SWITCH, "link", "set", f"v-{name}", "master", _BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in (_SWITCH, *HOSTS):
            _ip("netns", "del", name, check=False)


def set_cable(host: str, plugged: bool) -> None:
    """Pull a host's cable out of the switch, or plug it in again."""
    _ip("-n", _SWITCH, "link", "set", f"v-{host}", "up" if plugged else "down")
