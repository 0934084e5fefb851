"""The checkpoint agent and the launcher as processes: with which options they are started, addressed and reaped."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentProcess
from checkpointing.agent.options import AgentOptions
from checkpointing.agent.protocol import Message
from checkpointing.errors import AgentDelayed, AgentUnavailable, may_pass
from checkpointing.host.heartbeat import ControlPage, Heartbeat
from checkpointing.host.interpreter import module_command
from checkpointing.host.limits import explained
from runner.config.schema import Config
from runner.errors import LaunchDelayed, LaunchError
from runner.journal.run_directory import RunDirectory
from runner.launcher.launch_request import launcher_environment, modules_to_preload
from runner.program.program import Program
from runner.system import processes

# Seconds for the agent's answer; it listens already.
_HELLO_TIMEOUT_S = 60.0
# Seconds for a message of an agent that has ended: what it has sent is there already.
_LAST_S = 1.0
# Seconds. SIGKILL ends a process at once, unless the kernel holds it: a hung driver, a dead file server.
KILL_TIMEOUT_S = 30.0


class HelperProcess:
    """A process that this runner started, and the socket over which it takes requests and reports."""

    popen: subprocess.Popen[bytes]
    sock: socket.socket

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.popen.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process is running."""
        return self.popen.poll()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.popen.kill()

    def end(self) -> None:
        """Send SIGKILL, and wait for the end, unless the kernel holds the process."""
        self.popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(KILL_TIMEOUT_S)

    def send(self, message: Message) -> None:
        """Send a request; if the process is dead, the event loop notices."""
        with contextlib.suppress(OSError):
            protocol.send(self.sock, message)


class AgentHelper(HelperProcess):
    """A checkpoint agent.

    Attributes:
        process: The agent's client, which also has its socket and its folder.
        control: Page of shared memory with the heartbeats of the ranks.
    """

    def __init__(self, options: AgentOptions, *, directory: Path, cancelled: Callable[[], bool]) -> None:
        """Start an agent, with a socket in `directory`, and connect to it.

        Raises:
            LaunchError: The agent cannot start; the text says why.
            LaunchDelayed: It was killed, or may start later.
        """
        try:
            self.process = AgentProcess.start(options, directory=directory, cancelled=cancelled)
            self.popen = self.process.process
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

    def request(self, do: str, **details: Any) -> None:
        """Send a request, with its fields."""
        self.send({"do": do, **details})

    def last_messages(self) -> Iterator[Message]:
        """Yield what an agent that has ended had reported, and nobody has read."""
        self.sock.settimeout(_LAST_S)
        # Where it has left a request unread, the kernel reports that first, once.
        self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        with contextlib.suppress(OSError):
            while True:
                yield protocol.receive(self.sock)[0]

    def heartbeats(self, num_ranks: int) -> list[Heartbeat]:
        """Return the newest heartbeat of each rank of this node, in the order of their local ranks."""
        return [self.control.read(slot) for slot in range(min(num_ranks, self.control.num_slots))]

    def close(self) -> None:
        """Reap the process, which is killed if it is running."""
        self.sock.close()
        self.control.close()
        self.process.close(timeout_s=1.0 if self.alive else None)


class LauncherHelper(HelperProcess):
    """The launcher: a process that has loaded torch and starts the ranks of one attempt after the other."""

    def __init__(self, environment: dict[str, str], log: Path, temporary: Path) -> None:
        """Start a launcher, whose environment the ranks inherit; the caller removes its `temporary` files."""
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # multiprocessing's tracker removes the semaphores of killed ranks, and would print a warning for each.
        warnings = [environment.get("PYTHONWARNINGS", ""), "ignore:resource_tracker:UserWarning"]
        environment = {**environment, "PYTHONWARNINGS": ",".join(filter(None, warnings))}
        arguments = [str(theirs.fileno()), str(log), str(temporary), str(os.getpid())]
        try:
            self.popen = subprocess.Popen(
                module_command("runner.launcher.launcher", *arguments),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment,
                # The supervisor handles Ctrl-C; the terminal must not send it to the ranks.
                start_new_session=True,
            )
        except OSError as error:
            self.sock.close()
            theirs.close()
            raise (LaunchDelayed if may_pass(error) else LaunchError)(
                f"the launcher did not start: {error}{explained(str(error))}"
            ) from None
        theirs.close()

    def close(self) -> None:
        """Kill and reap the process."""
        self.sock.close()
        self.popen.kill()
        self.popen.wait()


class HelperStarter:
    """Starts checkpoint agents and launchers as configured, each with a temporary folder of its own in `runtime`.

    The agent commits if this node leads the run by then; ranks run `program`, or the bundled job.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        run_id: str,
        runtime: Path,
        leads: Callable[[], bool],
        program: Program | None = None,
    ) -> None:
        self._config, self._directory, self._run_id, self._runtime = config, directory, run_id, runtime
        self._leads, self._program = leads, program

    def start_agent(self, cancelled: Callable[[], bool]) -> AgentHelper:
        """Start a checkpoint agent; the start is given up once `cancelled()`, which is called meanwhile."""
        checkpoint = self._config.checkpoint
        options = AgentOptions(
            location=self._config.checkpoint_location,
            run_id=self._run_id,
            local_tier=checkpoint.local_tier,
            local_retention=checkpoint.local_retention,
            commits=self._leads(),
            memory_limit=checkpoint.memory_limit_bytes,
            # `runner start` has just tried it: what fails now may pass, as a disk that is remounted does.
            patience_s=self._config.launch.rendezvous_timeout_s,
        )
        return AgentHelper(options, directory=self._folder(), cancelled=cancelled)

    def start_launcher(self) -> LauncherHelper:
        """Start a launcher."""
        # Processes of a node are found by the identity of its own folder, also if the run's identity is the leader's.
        mark = processes.mark(self._directory.run_id(), self._config.launch.node_rank)
        environment = launcher_environment(self._config, mark, modules_to_preload(self._program), os.environ)
        return LauncherHelper(environment, self._directory.logs / "launcher.log", self._folder())

    def _folder(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(dir=self._runtime))
        except OSError as error:
            raise LaunchDelayed(f"no folder for temporary files: {error}") from None
