"""What people ask of a run: by `runner save` and `runner stop`, by the files that these make, by SIGUSR2."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from checkpointing.host.own_files import make_own_folder
from runner.system.event_loop import EventLoop, StopRequest

# Files in the folder of requests; who can write there may make them.
SAVE, STOP = "save", "stop"
# Seconds between two looks. The run's journal is in the same folder, so a look waits for no other file system.
LOOK_EVERY_S = 1.0


class Requests:
    """Counts requests for a checkpoint, and passes on one to stop.

    Args:
        folder: Where the files appear; only the leader looks there.
        stop: Is asked when a file says so.
    """

    def __init__(self, folder: Path, stop: StopRequest) -> None:
        self._folder, self._stop = folder, stop
        # By what a checkpoint was asked for, the oldest first.
        self._saves: list[str] = []

    def count_signals(self) -> None:
        """Count SIGUSR2 from now on."""

        def count(number: int, _: object) -> None:
            self._saves.append(signal.Signals(number).name)

        # Only the main thread may, and only it gets signals.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGUSR2, count)

    def watch(self, loop: EventLoop, *, begins: bool) -> None:
        """Look for files from now on.

        Args:
            loop: Looks.
            begins: Whether a session begins, for which those that are there were not meant.

        Raises:
            OSError: The folder cannot be made.
        """
        make_own_folder(self._folder, parents=True)
        for name in (SAVE, STOP) if begins else ():
            self._take(name)
        loop.every(LOOK_EVERY_S, self._look)

    def take_save(self) -> str:
        """Return by what a checkpoint was asked for since the last call; empty if by nothing."""
        return self._saves.pop(0) if self._saves else ""

    def _look(self) -> None:
        if self._take(STOP):
            self._stop.ask("runner stop")
        if self._take(SAVE):
            self._saves.append("runner save")

    def _take(self, name: str) -> bool:
        """Return whether a file was there; it is removed."""
        try:
            (self._folder / name).unlink()
        except OSError:
            return False
        return True
