"""The checkpoint agent and the launcher as processes: how each is started, told and reaped."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentProcess
from checkpointing.agent.options import AgentOptions
from checkpointing.agent.protocol import Message
from checkpointing.errors import AgentKilled, AgentUnavailable
from checkpointing.heartbeat import ControlPage, Heartbeat
from runner.errors import HelperKilled, LaunchError

# The agent has said that it listens.
_HELLO_TIMEOUT_S = 60.0


class AgentHelper:
    """A checkpoint agent that this supervisor started and monitors."""

    def __init__(
        self,
        options: AgentOptions,
        *,
        directory: Path,
        cancelled: Callable[[], bool],
    ) -> None:
        """Start it.

        Raises:
            LaunchError: it cannot start; the text says why. HelperKilled: somebody has killed it.
        """
        try:
            self.process = AgentProcess.start(options, directory=directory, cancelled=cancelled)
            self.sock = protocol.connect(self.process.socket_path, _HELLO_TIMEOUT_S)
            protocol.send(self.sock, {"do": "hello", "role": "monitor"})
            _, fds = protocol.receive(self.sock)
            self.sock.settimeout(None)
        except (AgentUnavailable, OSError) as error:
            # Before it has started, it can only lose its connection by its death.
            killed = isinstance(error, AgentKilled | ConnectionError)
            raise (HelperKilled if killed else LaunchError)(str(error)) from None
        self.control = ControlPage.attach(fds[0])

    @property
    def alive(self) -> bool:
        return self.process.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def returncode(self) -> int | None:
        """None while it lives."""
        return self.process.process.poll()

    def kill(self) -> None:
        self.process.process.kill()

    def wait(self, timeout_s: float) -> None:
        """
        Raises:
            subprocess.TimeoutExpired: It has not ended.
        """
        self.process.process.wait(timeout_s)

    def tell(self, request: str, **details: Any) -> None:
        """Send a request; a dead agent is noticed by the loop."""
        with contextlib.suppress(OSError):
            protocol.send(self.sock, {"do": request, **details})

    def heartbeats(self, num_ranks: int) -> list[Heartbeat]:
        return [self.control.read(slot) for slot in range(min(num_ranks, self.control.num_slots))]

    def close(self) -> None:
        """Reap it; killed if it still lives."""
        self.sock.close()
        self.control.close()
        self.process.close(timeout_s=1.0 if self.alive else None)


class LauncherHelper:
    """The warm launcher process."""

    def __init__(self, environment: dict[str, str], log: Path, temporary: Path) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Semaphores of ranks that were killed: multiprocessing's tracker removes them, and would tell the user of it.
        warnings = [environment.get("PYTHONWARNINGS", ""), "ignore:resource_tracker:UserWarning"]
        environment = {**environment, "PYTHONWARNINGS": ",".join(filter(None, warnings))}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "runner.node.launcher",
                str(theirs.fileno()),
                str(log),
                str(temporary),
                str(os.getpid()),
            ],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
            # A Ctrl-C of the terminal is the supervisor's to answer, not the ranks'.
            start_new_session=True,
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int:
        """Of a process that has ended."""
        status = self.process.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout_s: float) -> None:
        """
        Raises:
            subprocess.TimeoutExpired: It has not ended.
        """
        self.process.wait(timeout_s)

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            protocol.send(self.sock, message)

    def close(self) -> None:
        self.sock.close()
        self.process.kill()
        self.process.wait()
