"""Where checkpoints will be stored: access, bandwidth, free space."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointing.errors import CheckpointError
from checkpointing.storage import Storage
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.system.text import gb

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
            yield from _free_space(key, storage, state_bytes, kept)
            yield from _bandwidth(key, storage, state_bytes)
        except (CheckpointError, OSError) as error:
            yield _refused(key, storage, error)


def _refused(key: str, storage: Storage, error: Exception) -> Finding:
    text = getattr(error, "strerror", None) or str(error)
    return fail(key, f"{storage.location} cannot be used: {text}", "fix the cause, or set another location")


def _free_space(key: str, storage: Storage, state_bytes: int, kept: int) -> Iterator[Finding]:
    free = storage.free_bytes()
    if free is None:
        return
    # A new checkpoint is written before the oldest one is removed.
    needed = (kept + 1) * state_bytes
    text = f"{gb(free)} free at {storage.location}; {kept} checkpoints and one being written need {gb(needed)}"
    if free < 2 * state_bytes:
        yield fail(key, text, "free space, or set another location")
    elif free < needed:
        yield warn(key, text, "free space, or lower trainer.save_total_limit")
    else:
        yield ok(key, text)


def _bandwidth(key: str, storage: Storage, state_bytes: int) -> Iterator[Finding]:
    rates = storage.measure(state_bytes)
    if rates is None:
        return
    took = f"a checkpoint of {gb(state_bytes)} takes {state_bytes / rates.write:.2f} s"
    if rates.read is None:
        yield ok(f"{key} bandwidth", f"writes and syncs {rates.write / 1e6:.0f} MB/s: {took}")
    else:
        fences = "fences off" if storage.decides_between_writers else "cannot fence off"
        speed = f"writes {rates.write / 1e6:.0f} MB/s, reads {rates.read / 1e6:.0f} MB/s"
        yield ok(key, f"{storage.location} {speed}, and {fences} concurrent writers: {took}")
    if rates.clock_skew_s > _MAX_SKEW_S:
        text = f"the clocks of the file server and of this node differ by {rates.clock_skew_s:.0f} s"
        yield warn("clock", text, "synchronise both with NTP")
