"""Where checkpoints will lie: does it work, how fast is it, is there room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from checkpointing.errors import CheckpointError
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.object_storage import RemoteStorage
from checkpointing.storage.object_store import ObjectStore
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.hardware.storage_rates import disk_rate, object_rates

# What is written to measure by: enough to get past the caches of a disk's controller, little enough to take seconds.
from runner.text import gb

_MAX_SKEW_S = 5.0
# The Trainer keeps all where it is not told.
_DEFAULT_KEPT = 3


def check_places(config: Config, state_bytes: int) -> Iterator[Finding]:
    """Each tier: probe it, and measure what a checkpoint of this size takes."""
    tiers = config.tiers
    for storage in tiers.nearest_first:
        key = "checkpoint.location" if storage is tiers.durable else "checkpoint.local_tier"
        kept = config.trainer.get("save_total_limit") or _DEFAULT_KEPT
        kept = int(kept) if storage is tiers.durable else config.checkpoint.local_keep_last
        try:
            caveat = storage.probe()
            if caveat is not None:
                yield warn(key, caveat, "start one runner at a time there")
            if isinstance(storage, LocalStorage):
                yield from _disk(key, storage, state_bytes, kept)
            elif isinstance(storage, RemoteStorage):
                yield _object_store(key, storage.store, state_bytes)
            else:
                yield ok(key, f"{storage.location} can be written, read and listed")
        except (CheckpointError, OSError) as error:
            yield _refused(key, storage, error)


def _refused(key: str, storage: Storage, error: Exception) -> Finding:
    text = getattr(error, "strerror", None) or str(error)
    return fail(key, f"{storage.location} cannot be used: {text}", "mend that, or set another place")


def _disk(key: str, storage: LocalStorage, state_bytes: int, kept: int) -> Iterator[Finding]:
    usage = shutil.disk_usage(storage.root)
    # One more is written before the oldest is removed.
    wanted = (kept + 1) * state_bytes
    text = f"{gb(usage.free)} free at {storage.root}; {kept} checkpoints and one in the making want {gb(wanted)}"
    if usage.free < 2 * state_bytes:
        yield fail(key, text, "make room, or set another place")
    elif usage.free < wanted:
        yield warn(key, text, "make room, or lower trainer.save_total_limit")
    else:
        yield ok(key, text)
    rate, skew_s = disk_rate(storage, state_bytes)
    if not rate:
        return
    text = f"writes and syncs {rate / 1e6:.0f} MB/s: a checkpoint of {gb(state_bytes)} takes {state_bytes / rate:.2f} s"
    yield ok(f"{key}, speed", text)
    if skew_s > _MAX_SKEW_S:
        text = f"the file server's clock is {skew_s:.0f} s away from this machine's"
        yield warn("clock", text, "let both be kept by NTP")


def _object_store(key: str, store: ObjectStore, state_bytes: int) -> Finding:
    put, get = object_rates(store, state_bytes)
    decides = "decides between two writers" if store.honours_if_absent else "cannot decide between two writers"
    text = (
        f"{store.location} puts {put / 1e6:.0f} MB/s, gets {get / 1e6:.0f} MB/s, and {decides}: a checkpoint of "
        f"{gb(state_bytes)} takes {state_bytes / put:.1f} s"
    )
    return ok(key, text)
