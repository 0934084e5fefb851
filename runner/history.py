"""A run's journals, wherever the run has lived: kept beside its checkpoints, so that any machine can tell its story.

A journal lies in the folder that its runner was given, which may be a pod's own and gone with it. Where checkpoints lie
elsewhere, a copy is kept beside them, in chunks: only the last one is ever written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from checkpointing.errors import CheckpointError
from checkpointing.storage import LocalStorage, Storage, open_storage
from checkpointing.threads import in_background
from runner.config import Config, load_config
from runner.errors import RunnerError, UsageError
from runner.journal import Event, events_in, read_journal
from runner.record import RunRecord
from runner.run_directory import RunDirectory

_CHUNK_BYTES = 4 * 1024 * 1024
# Between two renewals of the copy.
COPY_INTERVAL_S = 15.0
# For the last words of a runner, whose agent has ended.
_PATIENCE_S = 5.0

Keep = Callable[[str, Path, int, int], None]


class JournalCopy:
    """The copy of one journal beside the checkpoints."""

    def __init__(self, journal: Path, lineage: str, run_id: str) -> None:
        """`lineage`: see `RunRecord`; it tells the journals of one run from those of another at the same place."""
        self._journal, self._name = journal, f"{_prefix(lineage)}{run_id}"
        self._kept, self._kept_at = 0, -COPY_INTERVAL_S

    def turn(self, now: float, keep: Keep) -> None:
        """Keep what is new, every now and then. `now` is monotonic; `keep` takes a name and bytes START to END."""
        if now - self._kept_at >= COPY_INTERVAL_S:
            self._kept_at = now
            self.flush(keep)

    def flush(self, keep: Keep) -> None:
        """Keep what is new."""
        try:
            size = self._journal.stat().st_size
        except OSError:
            return
        for number in range(self._kept // _CHUNK_BYTES, -(-size // _CHUNK_BYTES) if size > self._kept else 0):
            start = number * _CHUNK_BYTES
            keep(f"{self._name}.{number:06}.jsonl", self._journal, start, min(start + _CHUNK_BYTES, size))
        self._kept = size

    def finish(self, storage: Storage) -> None:
        """Keep the last events by ourselves, within seconds; what storage refuses is lost from the copy alone."""

        def write(name: str, path: Path, start: int, end: int) -> None:
            with path.open("rb") as file:
                file.seek(start)
                storage.write_record(name, file.read(end - start))

        with contextlib.suppress(Exception):
            in_background(lambda: self.flush(write), "journal").result(_PATIENCE_S)


def needs_copy(config: Config) -> bool:
    """Whether checkpoints outlive the run's folder."""
    durable = config.tiers.durable
    return not isinstance(durable, LocalStorage) or not durable.root.is_relative_to(Path(config.output_dir).absolute())


def events_at(place: str) -> list[Event]:
    """Every event of the run at a place, oldest first, of all its lives.

    Args:
        place: the run's folder, or the location of its checkpoints.

    Raises:
        UsageError: there is no run, or it cannot be read now.
    """
    place = place.removeprefix("file://") if place.startswith("file:///") else place
    directory = RunDirectory(place) if "://" not in place else None
    own = read_journal(directory.journal) if directory is not None else []
    try:
        storage = _durable(directory) if own and directory is not None else open_storage(place)
        copies = _copies(storage) if storage is not None else {}
    except (CheckpointError, OSError, ValueError) as error:
        if not own:
            text = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{place!r} cannot be read: {text}") from None
        copies = {}
    if own and directory is not None:
        # It is ahead of its copy.
        copies[next((event["run_id"] for event in reversed(own) if isinstance(event.get("run_id"), str)), "")] = own
    if not copies:
        raise UsageError(f"{place!r} holds no run; give the output_dir of one, or the location of its checkpoints")
    # Lives of one run follow each other; each one's clock is its machine's.
    return sorted((event for events in copies.values() for event in events), key=lambda event: event["time"])


def _durable(directory: RunDirectory) -> Storage | None:
    """Where this run's checkpoints lie, if a copy of its journals lies there, too."""
    try:
        config = load_config(str(directory.config), {}, needs_data=False)
    except RunnerError:
        return None
    config.move_to(directory.root)
    return config.tiers.durable if needs_copy(config) else None


def _copies(storage: Storage) -> dict[str, list[Event]]:
    """The events of each life whose journal was kept, by the id of its folder."""
    lineage = RunRecord.from_json(storage.read_note()).lineage
    prefix = _prefix(lineage) if lineage else ""
    data: dict[str, bytes] = {}
    for name, chunk in sorted(storage.read_records(prefix).items()):
        run_id = name.removeprefix(prefix).rsplit(".", 2)[0]
        data[run_id] = data.get(run_id, b"") + chunk
    return {run_id: list(events_in(whole)) for run_id, whole in data.items()}


def _prefix(lineage: str) -> str:
    return f"journal-{lineage}-"
