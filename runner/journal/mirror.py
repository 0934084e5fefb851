"""The journals of all sessions of a run: copied next to its checkpoints, so that any node can read them.

A journal is in the output folder of its runner, which may be lost with a pod. If checkpoints are elsewhere, a copy of
the journal is kept next to them, in chunks of which only the last one is ever rewritten.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.errors import CheckpointError
from checkpointing.host.threads import in_background
from checkpointing.storage import Storage, open_storage
from runner.errors import RunnerError, UsageError
from runner.journal.events import Entry, RunStarted
from runner.journal.journal import EventStream, JournalReader
from runner.journal.ledger import led_sessions
from runner.journal.run_directory import RunDirectory
from runner.recovery.restart_state import RestartState

if TYPE_CHECKING:
    from runner.config.schema import Config

_CHUNK_BYTES = 4 * 1024 * 1024
# Seconds between two updates of the copy.
COPY_INTERVAL_S = 15.0
# Seconds for the last events of a runner, which it copies itself because its agent has ended.
_PATIENCE_S = 5.0

# Has bytes of a file written next to the checkpoints: name of the copy, file, first byte, end of the bytes. Returns
# whether there is an agent to do it.
Keep = Callable[[str, Path, int, int], bool]


class JournalCopy:
    """The copy of one journal next to the checkpoints."""

    def __init__(self, journal: Path, lineage: str, run_id: str) -> None:
        """Prepare to copy; the lineage (see `RestartState`) separates the journals of two runs at one location."""
        self._journal, self._name = journal, f"{_prefix(lineage)}{run_id}"
        self._kept, self._kept_at, self._keeper = 0, -COPY_INTERVAL_S, 0

    def turn(self, now: float, keep: Keep, keeper: int) -> None:
        """Copy new events if the last update is 15 s old.

        Args:
            now: Monotonic seconds.
            keep: Writes the copy.
            keeper: Process id of the agent that writes it. After a change everything is copied again, as the earlier
                agent may have left requests undone.
        """
        if now - self._kept_at >= COPY_INTERVAL_S:
            self._kept_at = now
            if keeper != self._keeper:
                self._keeper, self._kept = keeper, 0
            self.flush(keep)

    def flush(self, keep: Keep) -> None:
        """Copy new events."""
        size = self._size()
        if size > self._kept and all(keep(*chunk) for chunk in self._chunks(self._kept // _CHUNK_BYTES, size)):
            self._kept = size

    def finish(self, storage: Storage) -> None:
        """Copy what is missing to the durable tier, for 5 s at most; errors leave the copy incomplete."""

        def write() -> None:
            known = storage.sidecars.sizes(self._name)
            for name, path, start, end in self._chunks(0, self._size()):
                if known.get(name) != end - start:
                    storage.sidecars.write_part(name, path, start, end)

        with contextlib.suppress(Exception):
            in_background(write, "journal").result(_PATIENCE_S)

    def _size(self) -> int:
        try:
            return self._journal.stat().st_size
        except OSError:
            return 0

    def _chunks(self, first: int, size: int) -> Iterator[tuple[str, Path, int, int]]:
        """Yield the arguments of `Keep` for each chunk from the number `first` on."""
        for number in range(first, -(-size // _CHUNK_BYTES)):
            start = number * _CHUNK_BYTES
            yield f"{self._name}.{number:06}.jsonl", self._journal, start, min(start + _CHUNK_BYTES, size)


def needs_copy(config: Config) -> bool:
    """Return whether checkpoints are outside of the run's folder."""
    root = config.tiers.durable.root
    return root is None or not root.is_relative_to(Path(config.output_dir).absolute())


class History:
    """The journals of one run. Each call of `entries` reads only what is new.

    Attributes:
        unread: Why the last result may be out of date; empty if it is not.
    """

    def __init__(self, place: str, patience_s: float | None = None, max_logs: int | None = None) -> None:
        """Prepare; nothing is read.

        Args:
            place: The run's folder, or the location of its checkpoints.
            patience_s: Seconds to wait for the copies of other sessions' journals if there are entries already; None
                to wait for all of them.
            max_logs: See `EventStream`; of each session.
        """
        self.unread, self._patience_s, self._max_logs = "", patience_s, max_logs
        self._place = place.removeprefix("file://") if place.startswith("file:///") else place
        self._directory = RunDirectory(self._place) if "://" not in place else None
        self._journal = JournalReader(self._directory.journal, max_logs) if self._directory is not None else None
        self._own: list[Entry] = []
        # Storage with the copies. True: at the location of the run in this folder; False: at the place itself.
        self._storages: dict[bool, Storage] = {}
        self._copies: dict[str, _Copy] = {}
        # By run id, the sessions whose journals were copied, without this folder's own.
        self._others: dict[str, list[Entry]] = {}
        # The read of them in a thread, which may take long; why the last one failed; when the next one is due, in
        # monotonic seconds.
        self._look: Future[dict[str, list[Entry]]] | None = None
        self._refusal, self._due_at = "", 0.0

    def entries(self) -> list[Entry]:
        """Return the entries of all sessions, oldest first; UsageError if there is no run, or it could not be read."""
        problem = self._read_own(self._journal) if self._journal is not None else ""
        own_id = next(
            (e.event.run_id for e in reversed(self._own) if isinstance(e.event, RunStarted) and e.event.run_id), ""
        )
        others_problem = self._look_for_others(own_id)
        self.unread = problem or others_problem
        sessions = {**self._others, **({own_id: self._own} if self._own else {})}
        if not sessions and self.unread:
            raise UsageError(f"{self._place!r} cannot be read: {self.unread}; give the output_dir of a run")
        if not sessions:
            raise UsageError(
                f"{self._place!r} holds no run; give the output_dir of one, or the location of its checkpoints"
            )
        led = {run_id: led_sessions(entries) for run_id, entries in sessions.items()}
        if any(led.values()):
            # Only a node that has never led, and cannot see another journal, shows what it has followed.
            sessions = led
        # Sessions of one run follow each other, each with the clock of its node.
        return sorted((entry for entries in sessions.values() for entry in entries), key=lambda entry: entry.time)

    def _read_own(self, journal: JournalReader) -> str:
        """Read this folder's journal; returns why the result may be out of date, or an empty string."""
        try:
            own = journal.entries()
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        if self._own and not own:
            return "the run's journal is missing"
        self._own = own
        return ""

    def _look_for_others(self, own_id: str) -> str:
        """Read the copies in a thread; returns why the result may be out of date, or an empty string."""
        in_folder = bool(self._own)
        if self._look is None and time.monotonic() >= self._due_at:
            self._look = in_background(lambda: self._read_copies(in_folder, own_id), "history")
            wait([self._look], self._patience_s if self._own or self._others else None)
        if self._look is not None and not self._look.done():
            return self._refusal or "the location of the checkpoints, which may have other journals, has not answered"
        if self._look is not None:
            look, self._look, self._due_at = self._look, None, time.monotonic() + COPY_INTERVAL_S
            try:
                self._others, self._refusal = look.result(), ""
            except (CheckpointError, OSError, ValueError) as error:
                self._refusal = getattr(error, "strerror", None) or str(error)
        return self._refusal

    def _storage(self, *, in_folder: bool) -> Storage | None:
        if in_folder not in self._storages:
            folder = self._directory if in_folder else None
            storage = _durable(folder) if folder is not None else open_storage(self._place)
            if storage is None:
                return None
            self._storages[in_folder] = storage
        return self._storages[in_folder]

    def _read_copies(self, in_folder: bool, own_id: str) -> dict[str, list[Entry]]:
        """Return the entries of each session except this folder's own, whose journal is newer than its copy."""
        storage = self._storage(in_folder=in_folder)
        if storage is None:
            return {}
        lineage = RestartState.from_json(storage.sidecars.read_restart_state()).lineage
        prefix = _prefix(lineage) if lineage else ""
        chunks: dict[str, dict[str, int]] = {}
        for name, size in storage.sidecars.sizes(prefix).items():
            chunks.setdefault(name.removeprefix(prefix).rsplit(".", 2)[0], {})[name] = size
        chunks.pop(own_id, None)
        return {
            run_id: self._copies.setdefault(run_id, _Copy(self._max_logs)).entries(sizes, storage.sidecars.read)
            for run_id, sizes in chunks.items()
        }


class _Copy:
    """The copy of one journal, as far as it was read."""

    def __init__(self, max_logs: int | None) -> None:
        self._max_logs = max_logs
        self._stream, self._sizes = EventStream(max_logs), dict[str, int]()

    def entries(self, sizes: dict[str, int], read: Callable[[str], bytes]) -> list[Entry]:
        """Return all entries, reading what is new; `sizes` are bytes of the chunks, in the order in which they grow."""
        *settled, last = self._sizes or [""]
        in_order = [*sizes][: len(self._sizes)] == [*self._sizes] and sizes.get(last, 0) >= self._sizes.get(last, 0)
        if not in_order or any(sizes[name] != self._sizes[name] for name in settled):
            # A chunk has appeared late, or was rewritten.
            self._stream, self._sizes = EventStream(self._max_logs), {}
        for name, size in sizes.items():
            done = self._sizes.get(name, 0)
            if size != done:
                chunk = read(name)
                self._stream.take(chunk[done:])
                self._sizes[name] = len(chunk)
        return self._stream.take(b"")


def _durable(directory: RunDirectory) -> Storage | None:
    """Return the durable tier of the run in a folder if it has copies of journals; None otherwise."""
    if _keeps_checkpoints_inside(directory):
        return None
    from runner.config.load import load_recorded

    try:
        config = load_recorded(directory.config)
    except RunnerError:
        return None
    config.move_to(directory.root)
    return config.tiers.durable if needs_copy(config) else None


def _keeps_checkpoints_inside(directory: RunDirectory) -> bool:
    """Return whether a run's configuration says for sure that checkpoints are in its folder, without loading it all.

    Loading takes longer than everything else that `runner status` does.
    """
    try:
        text = directory.config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    # As `Config.to_yaml` writes it, and only there.
    section = text.partition("\ncheckpoint:\n")[2]
    return section.startswith("  location: null\n")


def _prefix(lineage: str) -> str:
    return f"journal-{lineage}-"
