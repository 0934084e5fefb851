"""The part of a session's own node in a run."""

from __future__ import annotations

from collections.abc import Callable

from checkpointing.agent.events import Event
from runner.errors import LaunchDelayed, LaunchError
from runner.journal.attempts import Job
from runner.node.health_check import HealthCheck
from runner.node.node import Node
from runner.session.excluded_machines import exclude_own_machine
from runner.session.session import Session
from runner.system.processes import Host


def make_node(
    session: Session,
    job: Job,
    run_id: str,
    *,
    record: Callable[[Event], None] | None = None,
    build: Callable[..., Node] = Node,
) -> Node:
    """Return a session's own node of a run; nothing is started.

    Its events go to `record`, by default to the session's journal.
    """
    launch = session.config.launch
    health = HealthCheck(
        lambda fault: exclude_own_machine(session, fault), loop=session.loop, stop=session.stop, host=Host()
    )
    return build(
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
        **({"check_gpus": health.run} if launch.nnodes > 1 and launch.check_gpus else {}),
    )


class PatientStart:
    """Starts a node's helper processes again if they are killed, `restart.max_restarts` times between two attempts."""

    def __init__(self, session: Session) -> None:
        self._session, self._num_killed = session, 0

    def start(self, node: Node) -> bool:
        """Start what does not run; during a stop, failures do not matter any more.

        Returns:
            False if a process was killed, and this is to be called again.

        Raises:
            LaunchDelayed: Too often.
            LaunchError: A process cannot be started.
        """
        session = self._session
        if session.stop:
            return True
        try:
            node.ensure_processes()
        except LaunchDelayed as error:
            if session.stop:
                return True
            self._num_killed += 1
            if self._num_killed > session.config.restart.max_restarts:
                raise
            session.display.message(f"{error}; restarting it")
            # A limit of processes, for example, refuses at once, and again.
            session.sleep(float(self._num_killed))
            return False
        except LaunchError:
            if not session.stop:
                raise
        return True

    def succeeded(self) -> None:
        """Note that an attempt begins."""
        self._num_killed = 0
