"""Notes by which the nodes that write one checkpoint say how far they are, through the storage itself."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping

from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.storage import Storage
from checkpointing.storage.base import Transaction

# Between two signs of life of a node that writes.
ALIVE_S = 1.0
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.5


def await_note(
    transaction: Transaction,
    name: str,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    is_wanted: Callable[[], bool] = lambda: True,
) -> bytes | None:
    """Wait for a note; None where there is none after `patience_s` seconds, or it is not wanted any more.

    Raises:
        OSError: Storage refused.
    """
    since, pause = clock(), SHORTEST_LOOK_S
    while (note := transaction.read_note(name)) is None:
        if clock() - since > patience_s or not is_wanted():
            return None
        sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK_S)
    return note


class SignsOfLife:
    """Renews a note in the background, until it ends."""

    def __init__(self, transaction: Transaction, name: str) -> None:
        self._transaction, self._name = transaction, name
        self._over, self._born = threading.Event(), time.time_ns()
        self._thread = threading.Thread(target=self._renew, name="checkpoint-alive", daemon=True)
        self._thread.start()

    def end(self, error: str | None = None) -> None:
        """Write no more; with an error, that one a last time."""
        self._over.set()
        self._thread.join()
        if error is not None:
            self._write({"error": error})

    def _renew(self) -> None:
        number = 0
        while not self._over.wait(0 if number == 0 else ALIVE_S):
            number += 1
            self._write({"alive": [self._born, number]})

    def _write(self, state: Mapping[str, object]) -> None:
        # One that cannot be written is missed by the node that waits, soon enough.
        with contextlib.suppress(OSError):
            self._transaction.write_note(self._name, json.dumps(state).encode())


def error_in(note: bytes) -> str | None:
    """Return the error that a note reports, if it is one that does."""
    with contextlib.suppress(ValueError):
        document = json.loads(note)
        if isinstance(document, Mapping) and "error" in document:
            return str(document["error"])
    return None


def is_committed(storage: Storage, info: SnapshotInfo) -> bool:
    """Return whether a save is over: a node that still writes to it has come too late.

    Raises:
        OSError: Storage refused.
    """
    try:
        return storage.read_manifest(info.step).attempt == info.attempt
    except InvalidCheckpoint:
        return False
