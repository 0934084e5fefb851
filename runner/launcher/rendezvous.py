"""torchrun's rendezvous without its waits, and without ears for strangers: what it has no options for."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import time
from typing import Any

# Seconds between two looks at the rendezvous, at least and for each node.
_MEET_INTERVAL_S = 0.02
_MEET_INTERVAL_PER_NODE_S = 0.002
# Seconds to wait for the store of the leader before torch does.
_STORE_PATIENCE_S = 1.0
# Seconds that a store in etcd waits for one event.
_WATCH_S = 1.0


def meet_at_once(nnodes: int) -> None:
    """Have nodes look often whether the others have come to the rendezvous; torchrun looks once a second.

    They ask one store, so with more of them each asks less often.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    interval_s = min(max(_MEET_INTERVAL_S, nnodes * _MEET_INTERVAL_PER_NODE_S), 1.0)
    # torchrun also begins with a random wait, and takes what it has seen a second ago for the present. It has an option
    # for neither.
    setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(interval_s))  # noqa: B010
    # It inspects the whole stack twice for each of its records, which nothing reads: 0.3 s until three nodes have met
    # (2 cores, 2026-11-26).
    setattr(dynamic_rendezvous, "get_method_name", _method_name)  # noqa: B010
    holder: Any = dynamic_rendezvous._BackendRendezvousStateHolder
    if holder.__init__.__defaults__ == (1,):
        holder.__init__.__defaults__ = (0,)


def _method_name(depth: int = 2) -> str:
    """Return the name of the function so many calls above this one."""
    return sys._getframe(depth).f_code.co_name


def await_store(endpoint: str) -> None:
    """Wait until the leader's store can be connected to, or for as long as torch would between two tries.

    torch's first try is too early as often as not, and the second one comes most of a second later.
    """
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        return
    deadline = time.monotonic() + _STORE_PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _STORE_PATIENCE_S):
            return
        time.sleep(_MEET_INTERVAL_S)


@functools.cache
def watch_briefly() -> None:
    """Have torch's store in etcd look again every second; by default it waits five minutes for an event.

    Seen once: a node waited so long for a key that the other one had set.
    """
    import etcd

    watch = etcd.Client.watch

    def briefly(self: Any, key: str, *, timeout: float, **options: Any) -> Any:
        return watch(self, key, timeout=min(timeout, _WATCH_S), **options)

    etcd.Client.watch = briefly


def listen_on_loopback_only() -> None:
    """Have torch's stores of a run on one node listen on the loopback device only.

    By default they listen on all interfaces, and unpickle whatever a peer sends.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    def store(host_name: str, port: int, *, is_master: bool = False, **options: Any) -> TCPStore:
        if is_master:
            listener = socket.create_server(("127.0.0.1", port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        return TCPStore("127.0.0.1", port, is_master=is_master, **options)

    # Neither class takes the store's address or a listening socket.
    setattr(c10d_rendezvous_backend, "TCPStore", store)  # noqa: B010
    setattr(  # noqa: B010
        DynamicRendezvousHandler,
        "_create_tcp_store_server",
        lambda self, host, port: store(host, port, is_master=True, multi_tenant=True),
    )
