"""The port on which the leader listens for the runners of the other nodes, and whom it refuses."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

from runner.errors import UsageError
from runner.supervisor.identity import JobIdentity, differences, summarised
from runner.supervisor.peer_messages import Hello, ToLeader
from runner.supervisor.peers import Leader
from runner.supervisor.run_secret import ensure_secret
from runner.supervisor.session import Session


def listen(
    session: Session,
    num_nodes: int | None,
    receive: Callable[[int, ToLeader], None],
    identity: JobIdentity | None,
    open_leader: Callable[..., Leader] = Leader,
) -> Leader:
    """Listen for the other nodes of a run.

    Args:
        session: Of the leader.
        num_nodes: See `Leader`.
        receive: See `Leader`.
        identity: Of the job, which the others must share; None to accept any.
        open_leader: Opens the port.

    Raises:
        UsageError: The port is taken, or RUNNER_SECRET is too short.
        OSError: Storage refused the secret of the run.
    """
    launch, secret = session.config.launch, ensure_secret(session.config.tiers.durable)
    try:
        return open_leader(
            launch.peer_address,
            num_nodes,
            session.loop,
            receive,
            partial(refusal, identity),
            secret=secret,
            own=launch.node_rank,
            bind=launch.peer_bind,
            warn=session.display.message,
        )
    except OSError as error:
        raise _cannot_listen(error, launch.peer_address[1], launch.peer_bind) from None


def refusal(identity: JobIdentity | None, hello: Hello) -> str | None:
    """Return why a node is not admitted, None if it is: each was given its job by a command of its own.

    Args:
        identity: Of the leader's job; None to accept any.
        hello: Of the node.
    """
    theirs = JobIdentity.from_json(hello.job.encode())
    found = differences(identity, theirs) if identity is not None and theirs is not None else []
    if not found:
        return None
    return (
        f"this node was started for another job than the leader ({summarised(found)}); use the same command and "
        "files everywhere, or pass --allow-changes here"
    )


def _cannot_listen(error: OSError, port: int, bind: str | None) -> UsageError:
    if bind is not None and error.errno != errno.EADDRINUSE:
        return UsageError(
            f"launch.peer_bind: {bind!r} is not an address of this node ({error.strerror}); set an address of the "
            "first node, or leave it out to listen on all"
        )
    return UsageError(
        f"launch.peer_port: port {port} cannot be used ({error.strerror}); it is the rendezvous port + 1 unless "
        "you set it"
    )
