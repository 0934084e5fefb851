"""The two helper processes of a node, the checkpoint agent and the launcher: start, watch, replace and end them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psutil

from checkpointing.agent import protocol
from checkpointing.agent.events import Event, RestartStateFailed, StorageRetried
from checkpointing.agent.protocol import Message
from checkpointing.host.heartbeat import Heartbeat
from checkpointing.host.limits import NO_THREAD, explained
from runner.errors import LaunchDelayed, LaunchError
from runner.journal.events import Malformed, parse_event
from runner.launcher.rendezvous import EXIT_LIMITED
from runner.node.helper_processes import AgentHelper, LauncherHelper
from runner.system import processes
from runner.system.event_loop import EventLoop, StopRequest
from runner.system.processes import Host

_SOON_S = 0.05
# Seconds until the launcher has loaded torch; imports from a cold, slow disk take minutes.
_LAUNCHER_TIMEOUT_S = 600.0
# The agent sends these also while it makes no progress.
_NO_PROGRESS = {"pong", StorageRetried.name, RestartStateFailed.name}
# Seconds beyond the grace period of a stop request: a complete snapshot is worth a short wait.
_AGENT_HURRY_S = 5.0


class Helpers:
    """Keeps an agent and a launcher running.

    Attributes:
        agent: The checkpoint agent; None while there is none.
        launcher: The launcher; None while there is none.
        accelerators: GPUs that torch sees in the launcher; None until the launcher has reported.
        torch_has_cuda: Whether the launcher's torch was built for CUDA.
        pulse: When the agent was pinged, and what it said.
    """

    def __init__(
        self,
        *,
        start_agent: Callable[[Callable[[], bool]], AgentHelper],
        start_launcher: Callable[[], LauncherHelper],
        on_agent: Callable[[Event], None],
        on_launcher: Callable[[Message], None],
        on_agent_timeout: Callable[[float], None],
        check_gpus: Callable[[], None] = lambda: None,
        each_turn: Callable[[], None] = lambda: None,
        grace_s: float,
        quiet_timeout_s: float,
        loop: EventLoop,
        stop: StopRequest,
        host: Host,
    ) -> None:
        """Prepare; nothing is started.

        `start_agent` calls its argument while it waits, and gives up once that is true. `check_gpus` is called when the
        launcher has found GPUs, `each_turn` while that is waited for. An agent is killed after `quiet_timeout_s`
        without an answer (120 at most); `on_agent_timeout` is called if one was waited for in vain, for so many
        seconds.
        """
        self._start_agent, self._start_launcher = start_agent, start_launcher
        self._handle_agent, self._handle_launcher, self._on_timeout = on_agent, on_launcher, on_agent_timeout
        self._check_gpus, self._each_turn, self._grace_s = check_gpus, each_turn, grace_s
        self._loop, self._stop, self._host = loop, stop, host
        self.agent: AgentHelper | None = None
        self.launcher: LauncherHelper | None = None
        self.accelerators: int | None = None
        self.torch_has_cuda = self._warm = self._is_preparing = self._attempt_over = False
        self.pulse = AgentPulse(quiet_timeout_s, host.monotonic())

    def ensure(self) -> None:
        """Start the agent and the launcher unless they are running; return early if a stop is requested.

        Raises:
            LaunchError: One of them cannot be started.
            LaunchDelayed: One of them was killed meanwhile, or may start later.
            GpuFaulty: The GPUs of this node cannot be trusted.
        """
        self._drop_dead()
        if self.launcher is None:
            self.launcher = self._start_launcher()
            self._loop.register(self.launcher.sock, self._on_launcher)
        if self.agent is None:
            self.agent = self._start_agent(self._cancelled)
            self._loop.register(self.agent.sock, self._on_agent)
            self.pulse.answered(self._host.monotonic())
        deadline = self._host.monotonic() + _LAUNCHER_TIMEOUT_S
        while self.accelerators is None and not self._stop:
            self._loop.pump(_SOON_S)
            self._each_turn()
            if not self.launcher.alive:
                status = self.launcher.returncode
                assert status is not None
                if status < 0:
                    raise LaunchDelayed(f"the launcher was killed by signal {-status} while it loaded torch")
                if status == EXIT_LIMITED:
                    raise LaunchDelayed(f"the launcher did not start{explained(NO_THREAD)}")
                raise LaunchError(f"the launcher ended with status {status} while it loaded torch; its error is above")
            if self._host.monotonic() > deadline:
                raise LaunchDelayed(
                    f"the launcher has not loaded torch within {_LAUNCHER_TIMEOUT_S:.0f} s; check that python -c "
                    "'import torch' works on this node"
                )
        if self.accelerators:
            self._check_gpus()

    def request_agent(self, do: str, **details: Any) -> bool:
        """Send a request, with its fields, to the agent; returns False if there is none."""
        if self.agent is None or not self.agent.alive:
            return False
        self.agent.request(do, **details)
        return True

    def heartbeats(self, num_ranks: int) -> list[Heartbeat]:
        """Return the newest heartbeat of each of this node's `num_ranks` ranks, in the order of their local ranks."""
        return self.agent.heartbeats(num_ranks) if self.agent is not None else []

    @property
    def is_warm(self) -> bool:
        """Whether ranks need not wait for the launcher, nor for data; also if it is gone, and waiting is in vain."""
        is_gone = self.launcher is None or not self.launcher.alive
        return is_gone or (self._warm and not self._is_preparing)

    def prepare(self, spec: dict[str, str]) -> None:
        """Have the launcher prepare the data of the bundled job; `spec` is that of `run_preparation`."""
        if self.launcher is not None and self.launcher.alive and not self._is_preparing:
            self._is_preparing = True
            self.launcher.send({"prepare": spec})

    @property
    def pids(self) -> set[int]:
        """Process ids of the agent and the launcher."""
        return {helper.pid for helper in (self.agent, self.launcher) if helper is not None}

    def ping_agent(self, now: float) -> None:
        """Ping the agent every 2 s, and kill it if it does not answer in time."""
        assert self.agent is not None
        if self.pulse.ping_due(now):
            self.agent.request("ping")
        if self.pulse.is_silent(now) and self.agent.alive:
            self.agent.end()

    def end_attempt(self) -> None:
        """Wait until the agent has handled all messages of an attempt's ranks; see `wait_for_agent`."""
        self._attempt_over = False
        self.request_agent("end_attempt")
        self.wait_for_agent(lambda: self._attempt_over)

    def wait_for_agent(self, done: Callable[[], bool]) -> bool:
        """Wait until `done()`, or until the agent has exited; return whether it is done, or the status is 0.

        An agent that makes no progress is killed after 10 minutes, or 5 s after the grace period of a stop request.
        """
        assert self.agent is not None
        began = self._host.monotonic()
        self.pulse.restart(began)
        self.pulse.progressed(began)
        while self.agent.alive and not done():
            self._loop.pump(_SOON_S)
            now = self._host.monotonic()
            self.pulse.turn(now)
            self.ping_agent(now)
            deadline = self.pulse.give_up_at
            if self._stop:
                over_at = self._stop.over_at(self._grace_s)
                deadline = min(deadline, max(over_at, min(began, over_at) + _AGENT_HURRY_S))
            if now > deadline:
                self.agent.kill()
                self._on_timeout(now - began)
                return False
        return done() or self.agent.returncode == 0

    def strays(self) -> list[psutil.Process]:
        """Return the descendants that belong to no running helper: ranks, and processes that ranks have left."""
        keep = self.pids
        if self.launcher is not None and self.launcher.alive:
            keep |= _needed_by(self.launcher.pid)
        return [process for process in self._host.descendants() if process.pid not in keep]

    def close(self) -> bool:
        """End both processes, the agent once all snapshots are committed; return whether they are."""
        drained = True
        if self.launcher is not None:
            self._loop.unregister(self.launcher.sock)
            self.launcher.close()
        if self.agent is not None:
            self.agent.request("shutdown")
            drained = self.wait_for_agent(lambda: False)
            self._close_agent()
        self.launcher = None
        return drained

    def _cancelled(self) -> bool:
        """Return whether the start of an agent should be given up."""
        # The loop keeps running: other nodes expect keepalives.
        self._loop.pump(0.0)
        return bool(self._stop)

    def _drop_dead(self) -> None:
        if self.launcher is not None and not self.launcher.alive:
            self._loop.unregister(self.launcher.sock)
            self.launcher.close()
            self.launcher = self.accelerators = None
            self._warm = self._is_preparing = False
        if self.agent is not None and not self.agent.alive:
            self._close_agent()

    def _close_agent(self) -> None:
        assert self.agent is not None
        self._loop.unregister(self.agent.sock)
        for message in self.agent.last_messages() if not self.agent.alive else ():
            self._take_from_agent(message)
        self.agent.close()
        self.agent = None

    def _received(self, sock: Any) -> Message:
        try:
            return protocol.receive(sock)[0]
        except OSError:
            # The helper is dead, which `alive` reports; its socket would wake the loop without end.
            self._loop.unregister(sock)
            return {}

    def _on_launcher(self, sock: Any) -> None:
        message = self._received(sock)
        if message.get("event") == "ready":
            self.accelerators, self.torch_has_cuda = int(message["accelerators"]), bool(message["cuda"])
        elif message.get("event") == "warm":
            self._warm = True
        elif message.get("event") == "prepared":
            self._is_preparing = False
        elif message:
            self._handle_launcher(message)

    def _on_agent(self, sock: Any) -> None:
        self._take_from_agent(self._received(sock))

    def _take_from_agent(self, message: Message) -> None:
        name = message.pop("event", None)
        if name is not None and name not in _NO_PROGRESS:
            self.pulse.progressed(self._host.monotonic())
        match name:
            case protocol.PONG:
                self.pulse.answered(self._host.monotonic())
            case protocol.ATTEMPT_OVER:
                self._attempt_over = True
            case str() if name != protocol.ATTEMPT_BEGUN:
                event = parse_event(name, message)
                if not isinstance(event, Malformed):
                    self._handle_agent(event)


def _needed_by(launcher: int) -> set[int]:
    """Return the process ids of a launcher's fork server and resource tracker."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(launcher).children()
        return {child.pid for child in children if processes.is_fork_server(child) or processes.is_tracker(child)}
    return set()


# The agent answers at once, except while it allocates much memory.
_PING_INTERVAL_S = 2.0
_PONG_TIMEOUT_S = 120.0
# Seconds without progress of the agent. Storage that takes longer for a part of a commit hangs.
_PROGRESS_TIMEOUT_S = 600.0
# Seconds between two turns after which this process was itself stopped, and must not blame others for their silence.
_GAP_S = 3.0


class AgentPulse:
    """Keeps when an agent was pinged, when it answered, and when it made progress, in monotonic seconds."""

    def __init__(self, quiet_timeout_s: float, now: float) -> None:
        self._timeout_s = min(_PONG_TIMEOUT_S, quiet_timeout_s)
        self._pinged_at = self._answered_at = self._progressed_at = self._turned_at = now

    def restart(self, now: float) -> None:
        """Restart the time to answer: no ping was sent for a while."""
        self._turned_at = self._answered_at = now

    def turn(self, now: float) -> float:
        """Begin a turn of the loop; return for how long this process was stopped, which counts against no other."""
        gap, self._turned_at = now - self._turned_at, now
        gap = gap if gap > _GAP_S else 0.0
        self._answered_at += gap
        return gap

    def ping_due(self, now: float) -> bool:
        """Return whether to send a ping now, which is every 2 s."""
        if now - self._pinged_at < _PING_INTERVAL_S:
            return False
        self._pinged_at = now
        return True

    def answered(self, now: float) -> None:
        """Note an answer to a ping."""
        self._answered_at = now

    def progressed(self, now: float) -> None:
        """Note progress."""
        self._progressed_at = now

    def is_silent(self, now: float) -> bool:
        """Return whether an answer is overdue."""
        return now - self._answered_at > self._timeout_s

    @property
    def give_up_at(self) -> float:
        """When an agent that makes no progress until then is given up."""
        return self._progressed_at + _PROGRESS_TIMEOUT_S
