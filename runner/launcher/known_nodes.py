"""torchrun's rendezvous, of nodes that know each other and their places from their runners.

torchrun's own would find that out again, and for that unpickles what strangers write to its store.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from dataclasses import fields
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from runner.launcher.rendezvous import BACKEND, Meeting
from runner.system.sockets import listening

# Seconds between two looks whether the leader's store listens.
_LOOK_INTERVAL_S = 0.02
# Seconds to wait for the store of the leader before torch does.
_STORE_PATIENCE_S = 1.0
# Where the leader publishes the address of the store of an attempt's ranks.
_RANKS_ADDRESS = "ranks_address"


def register() -> None:
    """Make torchrun know the backend; its `rdzv_configs` are those of a `Meeting`."""
    with contextlib.suppress(ValueError):
        # It may be known already.
        rendezvous_handler_registry.register(BACKEND, KnownNodes)


class KnownNodes(RendezvousHandler):
    """Gives each node the place that it was given, and each attempt a store of its own, which its ranks share."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Take the `Meeting` from `parameters.config`, where torchrun adds options of its own."""
        self._run_id = parameters.run_id
        self._meeting = Meeting(**{one.name: parameters.config[one.name] for one in fields(Meeting)})
        self._ranks_store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use a store that exists already."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's place, and the stores; raises torch's DistError if the leader's cannot be reached."""
        meeting, host, port = self._meeting, self._meeting.own or self._meeting.host, 0
        timeout = timedelta(seconds=meeting.timeout_s)
        if meeting.is_host:
            self._ranks_store = _serve(meeting.bind, 0, timeout)
            port = self._ranks_store.port
        if meeting.nnodes == 1:
            assert self._ranks_store is not None
            store = PrefixStore(self._run_id, self._ranks_store)
        else:
            store = PrefixStore(self._run_id, _meeting_store(meeting, timeout))
            if meeting.is_host:
                store.set(_RANKS_ADDRESS, f"{host} {port}")
            host, number = store.get(_RANKS_ADDRESS).decode(errors="replace").rsplit(" ", 1)
            port = int(number)
        return RendezvousInfo(store, meeting.place, meeting.nnodes, RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        """Return False: an attempt is one rendezvous."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the supervisor admits nodes."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the attempt."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing; the stores go with the objects."""
        return True


def _meeting_store(meeting: Meeting, timeout: timedelta) -> TCPStore:
    if meeting.is_host:
        return _kept_server(meeting.bind, meeting.port, timeout)
    _await_store(meeting.host, meeting.port)
    return TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False)


@functools.cache
def _kept_server(bind: str | None, port: int, timeout: timedelta) -> TCPStore:
    """Return the store on the port that all nodes know; it is kept for later attempts, whose keys are others."""
    return _serve(bind, port, timeout)


def _serve(bind: str | None, port: int, timeout: timedelta) -> TCPStore:
    """Return a new store in this process, on a free port for 0."""
    listener = listening(bind, port)
    own = listener.getsockname()[1]
    return TCPStore(
        bind or "localhost",
        own,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _await_store(host: str, port: int) -> None:
    """Wait until the leader's store can be connected to, or for as long as torch would between two tries.

    torch's first try is too early as often as not, and the second one comes most of a second later.
    """
    deadline = time.monotonic() + _STORE_PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _STORE_PATIENCE_S):
            return
        time.sleep(_LOOK_INTERVAL_S)
