"""Whether the agent of this node is the one that writes checkpoints; the nodes of a run may take turns in that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Duty:
    """The duty of an agent, which the begin of an attempt may change.

    Attributes:
        commits: Whether this node writes; the agents of other nodes hold snapshots only.
    """

    commits: bool = True
