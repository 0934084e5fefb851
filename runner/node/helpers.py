"""The two helper processes of a node, the checkpoint agent and the launcher: started, watched, replaced, ended."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from typing import Any

import psutil

from checkpointing.agent import protocol
from checkpointing.agent.protocol import Message
from checkpointing.events import Event, RestartStateFailed, StorageRetried
from checkpointing.heartbeat import Heartbeat
from runner.errors import HelperKilled, LaunchError
from runner.journal.events import Malformed, parse_event
from runner.node.helper_processes import AgentHelper, LauncherHelper
from runner.system import processes
from runner.system.event_loop import EventLoop, StopRequest
from runner.system.host import Host

_SOON_S = 0.05
# Imports on a cold, slow disk.
_LAUNCHER_TIMEOUT_S = 600.0
# A commit to slow storage; what takes longer is a storage that hangs.
_AGENT_TIMEOUT_S = 600.0
# The agent sends these also while it makes no progress.
_NO_PROGRESS = {"pong", StorageRetried.name, RestartStateFailed.name}
# The same, once the user has asked twice: a snapshot that is whole is worth a moment.
_AGENT_HURRY_S = 5.0
# The agent answers at once; only when it allocates much memory it may take a while.
_PING_INTERVAL_S = 2.0
_PONG_TIMEOUT_S = 120.0
# A process that was itself stopped for longer than this must not blame others for their silence.
_GAP_S = 3.0
# SIGKILL ends a process at once, unless the kernel holds it: a hung driver, a dead file server.
KILL_TIMEOUT_S = 30.0


class Helpers:
    """Attributes:
    agent, launcher: None while they do not run.
    accelerators: GPUs that torch sees in the launcher; None until it has said so.
    torch_has_cuda: This torch was built for CUDA.
    """

    def __init__(
        self,
        *,
        start_agent: Callable[[Callable[[], bool]], AgentHelper],
        start_launcher: Callable[[], LauncherHelper],
        on_agent: Callable[[Event], None],
        on_attempt_over: Callable[[], None],
        on_launcher: Callable[[Message], None],
        grace_s: float,
        quiet_timeout_s: float,
        loop: EventLoop,
        stop: StopRequest,
        host: Host,
    ) -> None:
        """
        Args:
            start_agent: Starts a checkpoint agent; calls its argument meanwhile, and gives up once that is true.
            on_agent: Called with each event of the agent.
            on_attempt_over: Called when the agent has handled all messages of an attempt's ranks.
            on_launcher: Called with each message of the launcher, except for its first.
            grace_s: Seconds that whoever asks for a stop waits.
            quiet_timeout_s: Seconds without an answer after which the agent is killed (120 at most).
        """
        self._start_agent, self._start_launcher = start_agent, start_launcher
        self._handle_agent, self._handle_launcher = on_agent, on_launcher
        self._handle_attempt_over = on_attempt_over
        self._grace_s = grace_s
        self._pong_timeout_s = min(_PONG_TIMEOUT_S, quiet_timeout_s)
        self._loop, self._stop, self._host = loop, stop, host
        self.agent: AgentHelper | None = None
        self.launcher: LauncherHelper | None = None
        self.accelerators: int | None = None
        self.torch_has_cuda = False
        now = host.monotonic()
        self._heard_at = self._pinged_at = self._ponged_at = self._turned_at = now

    def ensure(self) -> None:
        """Have a living agent and a living launcher; returns early if a stop is asked for.

        Raises:
            LaunchError: One of them cannot be started.
            HelperKilled: One of them was killed meanwhile.
        """
        self._drop_dead()
        if self.launcher is None:
            self.launcher = self._start_launcher()
            self._loop.register(self.launcher.sock, self._on_launcher)
        if self.agent is None:
            self.agent = self._start_agent(self._cancelled)
            self._loop.register(self.agent.sock, self._on_agent)
            self._ponged_at = self._host.monotonic()
        deadline = self._host.monotonic() + _LAUNCHER_TIMEOUT_S
        while self.accelerators is None and not self._stop:
            self._loop.pump(_SOON_S)
            if not self.launcher.alive:
                status = self.launcher.returncode
                if status < 0:
                    raise HelperKilled(f"the launcher was killed by signal {-status} while it loaded torch")
                raise LaunchError(f"the launcher ended with status {status} while it loaded torch; its error is above")
            if self._host.monotonic() > deadline:
                raise LaunchError(f"the launcher has not loaded torch within {_LAUNCHER_TIMEOUT_S:.0f} s")

    def tell_agent(self, do: str, **details: Any) -> bool:
        """Send a request to the agent; False where there is none."""
        if self.agent is None or not self.agent.alive:
            return False
        self.agent.tell(do, **details)
        return True

    def heartbeats(self, num_ranks: int) -> list[Heartbeat]:
        """The newest of each rank of this node, in the order of their local ranks."""
        return self.agent.heartbeats(num_ranks) if self.agent is not None else []

    @property
    def pids(self) -> set[int]:
        return {helper.pid for helper in (self.agent, self.launcher) if helper is not None}

    def turn(self, now: float) -> float:
        """Seconds for which this process was stopped since the last turn, for which nobody else is to blame."""
        gap, self._turned_at = now - self._turned_at, now
        gap = gap if gap > _GAP_S else 0.0
        self._ponged_at += gap
        return gap

    def begin_turns(self) -> None:
        """Start the agent's time to answer: it has not been asked for a while."""
        self._turned_at = self._ponged_at = self._host.monotonic()

    def ping_agent(self, now: float) -> None:
        """Ask the agent for an answer now and then, and kill one that does not give any."""
        assert self.agent is not None
        if now - self._pinged_at >= _PING_INTERVAL_S:
            self._pinged_at = now
            self.agent.tell("ping")
        if now - self._ponged_at > self._pong_timeout_s and self.agent.alive:
            self.agent.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(KILL_TIMEOUT_S)

    def wait_for_agent(self, done: Callable[[], bool], on_timeout: Callable[[float], None]) -> bool:
        """Wait until `done()`, or until the agent has ended by itself; returns whether.

        An agent that makes no progress is killed after 10 minutes, or 5 s beyond the grace of a stop request;
        `on_timeout` is then called with the seconds waited.
        """
        assert self.agent is not None
        self.begin_turns()
        self._heard_at = began = self._host.monotonic()
        while self.agent.alive and not done():
            self._loop.pump(_SOON_S)
            now = self._host.monotonic()
            self.turn(now)
            self.ping_agent(now)
            deadline = self._heard_at + _AGENT_TIMEOUT_S
            if self._stop:
                over_at = self._stop.over_at(self._grace_s)
                deadline = min(deadline, max(over_at, min(began, over_at) + _AGENT_HURRY_S))
            if now > deadline:
                self.agent.kill()
                on_timeout(now - began)
                return False
        return done() or self.agent.returncode == 0

    def strays(self) -> list[psutil.Process]:
        """Descendants that belong to no living helper: ranks, and what ranks have left."""
        keep = self.pids
        if self.launcher is not None and self.launcher.alive:
            # Fork server and resource tracker.
            with contextlib.suppress(psutil.Error):
                keep |= {
                    child.pid
                    for child in psutil.Process(self.launcher.pid).children()
                    if processes.is_fork_server(child) or processes.is_tracker(child)
                }
        return [process for process in self._host.descendants() if process.pid not in keep]

    def close(self, on_timeout: Callable[[float], None]) -> bool:
        """End both, the agent once all snapshots are committed; returns whether they are."""
        drained = True
        if self.launcher is not None:
            self._loop.unregister(self.launcher.sock)
            self.launcher.close()
        if self.agent is not None:
            self.agent.tell("shutdown")
            drained = self.wait_for_agent(lambda: False, on_timeout)
            self._loop.unregister(self.agent.sock)
            self.agent.close()
        self.launcher = self.agent = None
        return drained

    def _cancelled(self) -> bool:
        """While the agent starts, the loop keeps running: other nodes expect signs of life."""
        self._loop.pump(0.0)
        return bool(self._stop)

    def _drop_dead(self) -> None:
        if self.launcher is not None and not self.launcher.alive:
            self._loop.unregister(self.launcher.sock)
            self.launcher.close()
            self.launcher = self.accelerators = None
        if self.agent is not None and not self.agent.alive:
            self._loop.unregister(self.agent.sock)
            self.agent.close()
            self.agent = None

    def _on_launcher(self, sock: Any) -> None:
        try:
            message, _ = protocol.receive(sock)
        except OSError:
            # It is dead; `alive` says so, and the socket must not wake the loop for ever.
            self._loop.unregister(sock)
            return
        if message["event"] == "ready":
            self.accelerators, self.torch_has_cuda = int(message["accelerators"]), bool(message["cuda"])
        else:
            self._handle_launcher(message)

    def _on_agent(self, sock: Any) -> None:
        try:
            message, _ = protocol.receive(sock)
        except OSError:
            self._loop.unregister(sock)
            return
        name = message.pop("event", None)
        if name not in _NO_PROGRESS:
            self._heard_at = self._host.monotonic()
        match name:
            case None | "attempt_begun":
                pass
            case "pong":
                self._ponged_at = self._host.monotonic()
            case "attempt_over":
                self._handle_attempt_over()
            case _:
                event = parse_event(name, message)
                if not isinstance(event, Malformed):
                    self._handle_agent(event)
