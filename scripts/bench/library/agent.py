"""A checkpoint agent with a monitor, as a supervisor starts it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentProcess
from checkpointing.agent.options import AgentOptions
from checkpointing.host.environment import SETTINGS_ENV, RankSettings


class MonitoredAgent:
    """An agent for a checkpoint location, which listens until the block ends.

    Attributes:
        events: The newest event of each name, with the monotonic time of its arrival under ``time``.
        committed_at: When a commit was reported, by its step, in seconds since the epoch.
    """

    def __init__(self, location: str) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.committed_at: dict[int, float] = {}
        self._agent = AgentProcess.start(AgentOptions(location=location, run_id="bench"))
        self._monitor = protocol.connect(self._agent.socket_path)
        protocol.send(self._monitor, {"do": "hello", "role": "monitor"})
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> MonitoredAgent:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the agent finish its commits and wait for its end; it may have been killed before."""
        # A signal alone does not end an agent that has a monitor.
        with contextlib.suppress(ConnectionError):
            protocol.send(self._monitor, {"do": "shutdown"})
        self._agent.close()
        self._listener.join()
        self._monitor.close()

    @property
    def pid(self) -> int:
        return self._agent.process.pid

    def environment(self, attempt: int) -> dict[str, str]:
        """Return the variables with which a rank finds this agent."""
        return {SETTINGS_ENV: RankSettings(agent_socket=self._agent.socket_path, attempt=attempt).to_json()}

    def kill(self) -> None:
        """End the agent at once, whatever it is writing."""
        self._agent.process.kill()
        self._agent.process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                event, _ = protocol.receive(self._monitor)
                # The answer to the hello has no name.
                name = str(event.get("event"))
                if name == "committed":
                    self.committed_at[event["step"]] = time.time()
                self.events[name] = {**event, "time": time.monotonic()}
