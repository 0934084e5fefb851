"""Notes by which the nodes that write one checkpoint say how far they are, through the storage itself."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

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


class OtherNodeFailed(Exception):
    """Another node has not written its part of a save.

    Attributes:
        name: What it was to report.
        error: What it has said itself, or what is wrong with its report; None where it was waited for in vain.
        silent_s: Seconds since the last sign of life of any node.
        waited_s: Seconds that it was waited for.
        is_alone: No other node has written anything at all.
    """

    def __init__(
        self, name: str, error: str | None = None, *, silent_s: float = 0, waited_s: float = 0, is_alone: bool = False
    ) -> None:
        super().__init__(error if error is not None else f"nothing from {name} for {waited_s:.0f} s")
        self.name, self.error = name, error
        self.silent_s, self.waited_s, self.is_alone = silent_s, waited_s, is_alone


def await_reports(
    names: Sequence[str],
    look: Callable[[list[str]], Iterable[tuple[bytes | None, bytes | None]]],
    take: Callable[[str, bytes], None],
    limits: Callable[[], tuple[float, float]],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all parts of a save that other nodes write are reported.

    Args:
        names: What is to be reported.
        look: Reads, for each of these that is lacking, its report, or else the last sign of life of its node.
        take: Called with each name and report once.
        limits: Longest silence of all nodes and longest wait, in seconds.
        clock: Seconds.
        sleep: Waits.

    Raises:
        OtherNodeFailed: A node could not write, or has shown no life or no progress for too long.
        OSError: Storage refused.
    """
    lacking, signs = list(names), dict[str, bytes]()
    # All signs of life count for all nodes: they end one after the other.
    began = since = clock()
    pause = SHORTEST_LOOK_S
    while True:
        asked = list(lacking)
        for name, (report, sign) in zip(asked, look(asked), strict=True):
            if report is not None:
                lacking.remove(name)
                since, pause = clock(), SHORTEST_LOOK_S
                take(name, report)
            elif sign is not None and sign != signs.get(name):
                signs[name], since = sign, clock()
                if (error := error_in(sign)) is not None:
                    raise OtherNodeFailed(name, error)
        if not lacking:
            return
        silent_s, waited_s, (patience_s, longest_s) = clock() - since, clock() - began, limits()
        if silent_s > patience_s or waited_s > longest_s:
            is_alone = len(lacking) == len(names) and not signs
            raise OtherNodeFailed(lacking[0], silent_s=silent_s, waited_s=waited_s, is_alone=is_alone)
        sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK_S)


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
