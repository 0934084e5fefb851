"""The part of a session's own node in a run."""

from __future__ import annotations

from collections.abc import Callable

from checkpointing.events import Event
from runner.node.messages import Job
from runner.node.node import Node
from runner.supervisor.session import Session


def own_node(
    session: Session,
    job: Job,
    run_id: str,
    *,
    record: Callable[[Event], None] | None = None,
    make_node: Callable[..., Node] = Node,
) -> Node:
    """Return the node of a session; nothing is started.

    Args:
        session: The session.
        job: What runs.
        run_id: Identity of the run, equal on all nodes.
        record: Takes its events; by default the session's journal.
        make_node: Makes it.
    """
    return make_node(
        session.config,
        session.directory,
        job,
        run_id,
        display=session.display,
        record=record or session.record,
        clock=session.clock,
        loop=session.loop,
        stop=session.stop,
        runtime=session.runtime,
    )
