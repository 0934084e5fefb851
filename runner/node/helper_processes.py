"""The checkpoint agent and the launcher as processes: how each is started, addressed and reaped."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentProcess
from checkpointing.agent.options import AgentOptions
from checkpointing.agent.protocol import Message
from checkpointing.errors import AgentDelayed, AgentUnavailable, may_pass
from checkpointing.host.heartbeat import ControlPage, Heartbeat
from runner.errors import LaunchDelayed, LaunchError

# Seconds for the agent's answer; it listens already.
_HELLO_TIMEOUT_S = 60.0
# Seconds for a message of an agent that has ended: what it has sent is there already.
_LAST_S = 1.0


class AgentHelper:
    """A checkpoint agent that this runner started and monitors.

    Attributes:
        process: The process.
        sock: The connection over which it reports.
        control: Page of shared memory with the heartbeats of the ranks.
    """

    def __init__(
        self,
        options: AgentOptions,
        *,
        directory: Path,
        cancelled: Callable[[], bool],
    ) -> None:
        """Start an agent and connect to it.

        Args:
            options: What the agent is to do.
            directory: A folder for its socket.
            cancelled: Called while the agent starts; the start is given up once it returns True.

        Raises:
            LaunchError: The agent cannot start; the text says why.
            LaunchDelayed: It was killed, or may start later.
        """
        try:
            self.process = AgentProcess.start(options, directory=directory, cancelled=cancelled)
            self.sock = protocol.connect(self.process.socket_path, _HELLO_TIMEOUT_S)
            protocol.send(self.sock, {"do": "hello", "role": "monitor"})
            _, fds = protocol.receive(self.sock)
            self.sock.settimeout(None)
        except (AgentUnavailable, OSError) as error:
            # An agent that has not started yet loses its connection only by its death.
            if hasattr(self, "process"):
                # It would keep the lock of the location, and no next one could start.
                self.process.close(timeout_s=0.0)
            if hasattr(self, "sock"):
                self.sock.close()
            is_delayed = isinstance(error, AgentDelayed | ConnectionError) or may_pass(error)
            raise (LaunchDelayed if is_delayed else LaunchError)(str(error)) from None
        self.control = ControlPage.attach(fds[0])

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.process.process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process is running."""
        return self.process.process.poll()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.process.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process.

        Raises:
            subprocess.TimeoutExpired: It has not ended.
        """
        self.process.process.wait(timeout_s)

    def request(self, do: str, **details: Any) -> None:
        """Send a request; if the agent is dead, the event loop notices.

        Args:
            do: Name of the request.
            details: Its fields.
        """
        with contextlib.suppress(OSError):
            protocol.send(self.sock, {"do": do, **details})

    def last_messages(self) -> Iterator[Message]:
        """Yield what an agent that has ended had reported, and nobody has read."""
        self.sock.settimeout(_LAST_S)
        # Where it has left a request unread, the kernel reports that first, once.
        self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        with contextlib.suppress(OSError):
            while True:
                yield protocol.receive(self.sock)[0]

    def heartbeats(self, num_ranks: int) -> list[Heartbeat]:
        """Return the newest heartbeat of each rank of this node, in the order of their local ranks.

        Args:
            num_ranks: Ranks on this node.
        """
        return [self.control.read(slot) for slot in range(min(num_ranks, self.control.num_slots))]

    def close(self) -> None:
        """Reap the process, which is killed if it is running."""
        self.sock.close()
        self.control.close()
        self.process.close(timeout_s=1.0 if self.alive else None)


class LauncherHelper:
    """The launcher: a process that has loaded torch and starts the ranks of one attempt after the other.

    Attributes:
        process: The process.
        sock: The connection over which it takes requests and reports.
    """

    def __init__(self, environment: dict[str, str], log: Path, temporary: Path) -> None:
        """Start a launcher.

        Args:
            environment: Its environment, which the ranks inherit.
            log: File for torchrun's log.
            temporary: Folder for its temporary files, which the caller removes.
        """
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # multiprocessing's tracker removes the semaphores of killed ranks, and would print a warning for each.
        warnings = [environment.get("PYTHONWARNINGS", ""), "ignore:resource_tracker:UserWarning"]
        environment = {**environment, "PYTHONWARNINGS": ",".join(filter(None, warnings))}
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "runner.launcher.launcher",
                    str(theirs.fileno()),
                    str(log),
                    str(temporary),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment,
                # The supervisor handles Ctrl-C; the terminal must not send it to the ranks.
                start_new_session=True,
            )
        except OSError as error:
            self.sock.close()
            theirs.close()
            raise (LaunchDelayed if may_pass(error) else LaunchError)(f"the launcher did not start: {error}") from None
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def returncode(self) -> int:
        """Exit status of a process that has ended, negative for a signal."""
        status = self.process.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process.

        Raises:
            subprocess.TimeoutExpired: It has not ended.
        """
        self.process.wait(timeout_s)

    def send(self, message: Message) -> None:
        """Send a request; if the launcher is dead, the event loop notices."""
        with contextlib.suppress(OSError):
            protocol.send(self.sock, message)

    def close(self) -> None:
        """Kill and reap the process."""
        self.sock.close()
        self.process.kill()
        self.process.wait()
