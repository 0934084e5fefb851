"""The port on which the leader listens for the runners of the other nodes, and whom it refuses."""

from __future__ import annotations

import errno
from collections.abc import Callable

from runner.errors import ExitCode, UsageError
from runner.peers.auth import ensure_secret
from runner.peers.link import Leader
from runner.peers.messages import MAX_REASON, Finish, Hello, ToLeader
from runner.session.bad_machines import Exclusion
from runner.session.identity import JobIdentity, differences, summarised
from runner.session.session import Session


def listen(
    session: Session,
    num_nodes: int | None,
    receive: Callable[[int, ToLeader], None],
    identity: JobIdentity | None,
    exclusion: Exclusion,
    open_leader: Callable[..., Leader] = Leader,
    host: str = "",
) -> Leader:
    """Listen for the other nodes of a run.

    Args:
        session: Of the leader.
        num_nodes: See `Leader`.
        receive: See `Leader`.
        identity: Of the job, which the others must share; None to accept any.
        exclusion: Knows the machines that are not admitted.
        open_leader: Opens the port.
        host: Address of this node if it leads in place of the first one, whose address `launch.peer_bind` may be.

    Raises:
        UsageError: The port is taken, or RUNNER_SECRET is too short.
        OSError: Storage refused the secret of the run.
    """
    launch, secret = session.config.launch, ensure_secret(session.config.tiers.durable)
    bind = (host or launch.peer_bind) if launch.peer_bind is not None else None
    try:
        return open_leader(
            launch.peer_address,
            num_nodes,
            session.loop,
            receive,
            lambda hello: refusal(identity, exclusion, hello),
            secret=secret,
            own=launch.node_rank,
            bind=bind,
            warn=session.display.message,
        )
    except OSError as error:
        raise _cannot_listen(error, launch.peer_address[1], bind) from None


def refusal(identity: JobIdentity | None, exclusion: Exclusion, hello: Hello) -> Finish | None:
    """Return how a node is to end that is not admitted, None if it is; without an identity any job is accepted."""
    if (why := _other_job(identity, hello)) is not None:
        return Finish(exit_code=ExitCode.USAGE.value, reason=why[:MAX_REASON])
    if (why := exclusion.refusal(hello.machine)) is not None:
        return Finish(exit_code=ExitCode.BAD_NODE.value, reason=why[:MAX_REASON])
    return None


def _other_job(identity: JobIdentity | None, hello: Hello) -> str | None:
    """Return why a node's job is another one, None if it is not: each was given its job by a command of its own."""
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
