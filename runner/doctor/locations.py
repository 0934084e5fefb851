"""Where checkpoints will lie: does it work, how fast is it, is there room."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointing.errors import CheckpointError
from checkpointing.storage import Storage
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
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
            yield from _room(key, storage, state_bytes, kept)
            yield from _speed(key, storage, state_bytes)
        except (CheckpointError, OSError) as error:
            yield _refused(key, storage, error)


def _refused(key: str, storage: Storage, error: Exception) -> Finding:
    text = getattr(error, "strerror", None) or str(error)
    return fail(key, f"{storage.location} cannot be used: {text}", "mend that, or set another place")


def _room(key: str, storage: Storage, state_bytes: int, kept: int) -> Iterator[Finding]:
    free = storage.free_bytes()
    if free is None:
        return
    # One more is written before the oldest is removed.
    wanted = (kept + 1) * state_bytes
    text = f"{gb(free)} free at {storage.location}; {kept} checkpoints and one in the making want {gb(wanted)}"
    if free < 2 * state_bytes:
        yield fail(key, text, "make room, or set another place")
    elif free < wanted:
        yield warn(key, text, "make room, or lower trainer.save_total_limit")
    else:
        yield ok(key, text)


def _speed(key: str, storage: Storage, state_bytes: int) -> Iterator[Finding]:
    rates = storage.measure(state_bytes)
    if rates is None:
        return
    took = f"a checkpoint of {gb(state_bytes)} takes {state_bytes / rates.write:.2f} s"
    if rates.read is None:
        yield ok(f"{key}, speed", f"writes and syncs {rates.write / 1e6:.0f} MB/s: {took}")
    else:
        decides = "decides" if storage.decides_between_writers else "cannot decide"
        speed = f"puts {rates.write / 1e6:.0f} MB/s, gets {rates.read / 1e6:.0f} MB/s"
        yield ok(key, f"{storage.location} {speed}, and {decides} between two writers: {took}")
    if rates.clock_skew_s > _MAX_SKEW_S:
        text = f"the file server's clock is {rates.clock_skew_s:.0f} s away from this machine's"
        yield warn("clock", text, "let both be kept by NTP")
