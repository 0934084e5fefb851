"""Reads a checkpoint into an arena, once for all ranks of the node."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from checkpointing.agent.arenas import Arena
from checkpointing.agent.events import Fetched, FetchFailed
from checkpointing.agent.reporting import Clock, progress_reporter, text_of
from checkpointing.agent.results import Report
from checkpointing.commit.catalog import CatalogEntry
from checkpointing.commit.reading import pieces_of
from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.digest import RunningDigest, algorithm_of
from checkpointing.format.manifest import FileEntry

_FETCHED_AT_ONCE = 2


def fetch(entry: CatalogEntry, arena: Arena, tier: str, report: Report, clock: Clock = time.monotonic) -> None:
    """Read a checkpoint's files into an arena, and compare their digests.

    Args:
        entry: The checkpoint; it has a manifest.
        arena: Where to, its `files` in the order of the manifest's.
        tier: Name of the storage's tier in events.
        report: Takes `Fetched` or `FetchFailed` with the arena, and progress.
        clock: Seconds.
    """
    manifest, storage, since = entry.manifest, entry.storage, clock()
    assert manifest is not None
    storage.watch(progress_reporter("download", entry.step, manifest.total_bytes, report, clock))

    def read(placed: tuple[str, int, int], recorded: FileEntry) -> str:
        name, offset, nbytes = placed
        digest = RunningDigest(algorithm_of(recorded.digest))
        end = offset
        for piece in pieces_of(storage.file(manifest, name)):
            digest.update(piece)
            # Not through the mapping, in which each page would be cleared first, and cost a fault.
            arena.write(end, piece)
            end += len(piece)
        if end != offset + nbytes:
            raise OSError(0, f"it has {end - offset} bytes, not {nbytes}")
        return digest.result()

    try:
        with ThreadPoolExecutor(_FETCHED_AT_ONCE, "checkpoint-fetch") as pool:
            digests = list(pool.map(read, arena.files, manifest.files))
        altered = [file.name for file, digest in zip(manifest.files, digests, strict=True) if digest != file.digest]
        if altered:
            raise InvalidCheckpoint(storage.describe(entry.step), f"{altered[0]} was altered: its digest differs")
    except Exception as error:
        # Of any kind, as ranks wait for the report. They will read it themselves, and find what is wrong.
        report(FetchFailed(step=entry.step, error=text_of(error)), arena)
        return
    arena.digests = {file.name: file.digest for file in manifest.files}
    arena.digested.set()
    duration_s, nbytes = round(clock() - since, 4), manifest.total_bytes
    report(Fetched(step=entry.step, tier=tier, nbytes=nbytes, duration_s=duration_s), arena)
