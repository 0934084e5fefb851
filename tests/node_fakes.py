"""A host, an event loop and helper processes for unit tests of a node: time passes when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from checkpointing.heartbeat import Heartbeat, Phase
from runner.system.host import Host


class FakeHost(Host):
    def __init__(self) -> None:
        self.now = 1000.0
        self.kernel_oom_kills = 0
        # By pid; everything else sleeps.
        self.states: dict[int, str] = {}
        self.sweeps = 0

    def monotonic(self) -> float:
        return self.now

    def oom_kills(self) -> int:
        return self.kernel_oom_kills

    def process_state(self, pid: int) -> str:
        return self.states.get(pid, "S")

    def descendants(self) -> list[Any]:
        return []

    def kill_all(self, find: Callable[[], list[Any]], timeout_s: float = 10.0) -> int:
        self.sweeps += 1
        return 0

    def reap_strays(self, managed: set[int]) -> None:
        pass


class FakeLoop:
    """Each wait takes as long as it may, and is followed by what the test has planned next, if anything."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self.plan: list[Callable[[], None]] = []
        self.registered: dict[Any, Callable[[Any], None]] = {}

    def register(self, file: Any, handler: Callable[[Any], None]) -> None:
        self.registered[file] = handler

    def unregister(self, file: Any) -> None:
        self.registered.pop(file, None)

    def pump(self, timeout_s: float) -> None:
        self._host.now += timeout_s
        if self.plan:
            self.plan.pop(0)()


class FakeHelper:
    """A checkpoint agent, or a launcher."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sock = object()
        self.alive, self.closed = True, False
        self.returncode = 0
        self.beats: list[Heartbeat] = []
        self.requests: list[str] = []
        self.process = SimpleNamespace(socket_path="agent.sock")

    def kill(self) -> None:
        self.alive, self.returncode = False, -9

    def wait(self, timeout_s: float) -> None:
        assert not self.alive

    def tell(self, do: str, **details: Any) -> None:
        self.requests.append(do)

    def heartbeats(self, num_ranks: int) -> list[Heartbeat]:
        return self.beats[:num_ranks]

    def send(self, message: dict[str, Any]) -> None:
        self.requests.append("launch")

    def close(self) -> None:
        self.closed = True


class FakeDisplay:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.state = SimpleNamespace(
            attempt=1,
            step=0,
            total_steps=None,
            loss=None,
            tokens_per_s=None,
            committed_step=None,
            transfer="",
            activity="",
            show_transfer=lambda message: None,
        )

    def message(self, text: str) -> None:
        self.texts.append(text)


def beat(phase: Phase, step: int = 0, *, beats: int = 1, start_step: int = 0, step_s: float = 0.1) -> Heartbeat:
    """A heartbeat of a rank."""
    return Heartbeat(
        phase=phase, step=step, beats=beats, start_step=start_step, step_s=step_s, start_time=1.0, time=2.0
    )
