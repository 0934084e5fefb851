"""Where checkpoints will be stored: access, bandwidth, free space."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointing.errors import CheckpointError
from checkpointing.storage import Storage
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.hardware.storage_rates import disk_rate, object_rates
from runner.text import gb

_MAX_SKEW_S = 5.0
# Assumed number of checkpoints where save_total_limit is not set and the Trainer keeps all.
_DEFAULT_KEPT = 3


def check_locations(config: Config, state_bytes: int) -> Iterator[Finding]:
    """Probe each tier and measure its bandwidth.

    Args:
        config: The run.
        state_bytes: Size of a checkpoint in bytes.
    """
    tiers = config.tiers
    for storage in tiers.nearest_first:
        key = "checkpoint.location" if storage is tiers.durable else "checkpoint.local_tier"
        kept = config.trainer.get("save_total_limit") or _DEFAULT_KEPT
        kept = int(kept) if storage is tiers.durable else config.checkpoint.local_keep_last
        try:
            caveat = storage.probe()
            if caveat is not None:
                yield warn(key, caveat, "make sure that only one runner at a time uses it")
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
    return fail(key, f"{storage.location} cannot be used: {text}", "fix the cause, or set another location")


def _disk(key: str, storage: LocalStorage, state_bytes: int, kept: int) -> Iterator[Finding]:
    usage = shutil.disk_usage(storage.root)
    # A new checkpoint is written before the oldest one is removed.
    needed = (kept + 1) * state_bytes
    text = f"{gb(usage.free)} free at {storage.root}; {kept} checkpoints and one being written need {gb(needed)}"
    if usage.free < 2 * state_bytes:
        yield fail(key, text, "free space, or set another location")
    elif usage.free < needed:
        yield warn(key, text, "free space, or lower trainer.save_total_limit")
    else:
        yield ok(key, text)


def _speed(key: str, storage: Storage, state_bytes: int) -> Iterator[Finding]:
    rates = storage.measure(state_bytes)
    if rates is None:
        return
    text = f"writes and syncs {rate / 1e6:.0f} MB/s: a checkpoint of {gb(state_bytes)} takes {state_bytes / rate:.2f} s"
    yield ok(f"{key} bandwidth", text)
    if skew_s > _MAX_SKEW_S:
        text = f"the clocks of the file server and of this node differ by {skew_s:.0f} s"
        yield warn("clock", text, "synchronise both with NTP")


def _object_store(key: str, store: ObjectStore, state_bytes: int) -> Finding:
    put, get = object_rates(store, state_bytes)
    fences = "fences off concurrent writers" if store.honours_if_absent else "cannot fence off concurrent writers"
    text = (
        f"{store.location} writes {put / 1e6:.0f} MB/s, reads {get / 1e6:.0f} MB/s, and {fences}: a checkpoint of "
        f"{gb(state_bytes)} takes {state_bytes / put:.1f} s"
    )
    return ok(key, text)
