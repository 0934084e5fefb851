"""How a node takes part in the rendezvous of an attempt, as its runner knows it."""

from __future__ import annotations

from dataclasses import dataclass

# The name of `rdzv_backend` in torchrun.
BACKEND = "runner"
# Status of a launcher that could start no thread or process, or open no file.
EXIT_LIMITED = 71  # EX_OSERR


@dataclass(frozen=True)
class Meeting:
    """How this node takes part in an attempt's rendezvous.

    Attributes:
        host: Address of the node that keeps the stores, as this node reaches it.
        port: Port of the store where nodes meet; 0 on one node, which needs none.
        is_host: Whether this node keeps the stores.
        bind: Address that the stores listen on; None for all.
        own: Address of this node for the others; empty for `host`, where it keeps the stores.
        place: Place of this node among those of the attempt, from 0.
        nnodes: Nodes of the attempt.
        timeout_s: Seconds to wait for the other nodes.
    """

    host: str
    port: int
    is_host: bool
    bind: str | None
    own: str
    place: int
    nnodes: int
    timeout_s: float
