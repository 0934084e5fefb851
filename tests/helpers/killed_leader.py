"""The command `runner`, whose first node is killed at a chosen step of its protocol.

    python tests/helpers/killed_leader.py TRACE [STEP NUMBER] -- start …

A step is anything that another node, the storage or a later runner can see: a message sent or received, an event on
record, the restart state next to the checkpoints, a message to the agent, the end of the processes. Each is written to
TRACE before it is done; with STEP and NUMBER the process kills itself before its NUMBER-th step of that name.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpointing.storage.sidecars import LocalSidecars
from runner.__main__ import main
from runner.journal.journal import Journal
from runner.node.helpers import Helpers
from runner.node.node import Node
from runner.peers.connection import Connection
from runner.supervisor.membership import Membership

# Their number depends on time, not on the protocol.
_BY_TIME = {"sent ping", "sent busy", "received busy", "recorded progress", "received event", "agent ping"}


class Steps:
    def __init__(self, trace: str, name: str = "", number: int = 0) -> None:
        self._trace, self._name, self._number = Path(trace), name, number
        self._counts: Counter[str] = Counter()

    def take(self, name: str) -> None:
        if name in _BY_TIME:
            return
        self._counts[name] += 1
        with self._trace.open("a") as file:
            file.write(f"{name}\n")
        if (name, self._counts[name]) == (self._name, self._number):
            os.kill(os.getpid(), signal.SIGKILL)


def before(owner: type, method: str, name: Callable[..., str], steps: Steps) -> None:
    original = getattr(owner, method)

    def traced(self: Any, *arguments: Any, **options: Any) -> Any:
        steps.take(name(*arguments, **options))
        return original(self, *arguments, **options)

    setattr(owner, method, traced)


def trace(steps: Steps) -> None:
    before(Connection, "send", lambda message: f"sent {message.do}", steps)
    before(Membership, "_on_message", lambda number, message: f"received {message.do}", steps)
    before(Journal, "append", lambda event, attempt: f"recorded {event.name}", steps)
    before(Helpers, "request_agent", lambda do, **details: f"agent {do}", steps)
    before(Node, "close", lambda: "processes end", steps)
    before(LocalSidecars, "replace_restart_state", lambda data: "restart state", steps)
    before(Membership, "dismiss", lambda decision: "others dismissed", steps)
    before(Connection, "drain", lambda timeout_s: "messages sent", steps)


if __name__ == "__main__":
    own, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    trace(Steps(own[0], own[1], int(own[2])) if len(own) > 1 else Steps(own[0]))
    sys.argv = ["runner", *command]
    main()
