"""The options of a `CheckpointManager`, validated, with the supervisor's and the user's overrides applied."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import cast, get_args

from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers, open_tiers
from checkpointing.host.environment import VERIFY_ENV, RankSettings
from checkpointing.host.memory import parse_bytes
from checkpointing.manager.rehearsal import rehearsal
from checkpointing.proof.repetition import Verify
from checkpointing.snapshot.cadence import Cadence


@dataclass(frozen=True)
class Options:
    """What a manager does. `CheckpointManager` describes the arguments that this comes from.

    Attributes:
        settings: The settings of this process.
        own_location: The location that the script chose; empty for none.
        tiers: Where the run keeps its checkpoints.
        local_keep_last: Newest checkpoints to keep in the local tier.
        resume: `auto`, `never` or a step.
        cadence: How often to snapshot and to commit.
        retention: Which checkpoints to keep.
        memory_limit: Bytes that snapshots may take on this node; None for half of what is free.
        overlap: Whether to copy during training; None chooses by measured cost.
        check_replicas: Whether to compare the ranks' state before each snapshot.
        buddy_copies: Whether each node keeps a copy of another one's shards in memory.
        allow_non_finite: Whether parameters and optimizer state may hold NaN or infinity.
        verify: What a resume does with the step record.
    """

    settings: RankSettings
    own_location: str
    tiers: Tiers
    local_keep_last: int
    resume: str | int
    cadence: Cadence
    retention: Retention
    memory_limit: int | None
    overlap: bool | None
    check_replicas: bool
    buddy_copies: bool
    allow_non_finite: bool = False
    verify: Verify = "auto"

    @classmethod
    def resolve(
        cls,
        settings: RankSettings,
        *,
        location: str | os.PathLike[str] | None,
        local_tier: str | os.PathLike[str] | None,
        local_keep_last: int,
        resume: str | int | None,
        memory_limit: int | str | None,
        cadence: Cadence,
        retention: Retention,
        overlap: bool | None,
        check_replicas: bool,
        buddy_copies: bool,
        allow_non_finite: bool = False,
    ) -> Options:
        """Apply the settings to what a script asks for.

        Raises:
            ValueError: A value is not allowed, or there is no location.
        """
        own_location = os.fspath(location or "")
        if not (settings.location or own_location):
            raise ValueError("CheckpointManager needs a location: a directory for the checkpoints")
        if settings.location:
            local_tier = settings.local_tier or None
        cadence = replace(cadence, **settings.cadence)
        if (short := rehearsal()) is not None:
            cadence = Cadence(short.snapshot_steps, short.save_steps, None, cadence.overhead_cap)
        tiers = open_tiers(settings.location or own_location, os.fspath(local_tier) if local_tier is not None else None)
        return cls(
            settings=settings,
            own_location=own_location,
            tiers=tiers,
            local_keep_last=local_keep_last,
            resume=resume_policy(settings.resume or str(resume if resume is not None else "auto")),
            cadence=cadence,
            retention=retention,
            memory_limit=parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit,
            overlap=overlap,
            check_replicas=check_replicas,
            buddy_copies=buddy_copies,
            allow_non_finite=allow_non_finite,
            verify=verify_policy(settings.verify or "auto"),
        )

    @property
    def has_chosen_location(self) -> bool:
        """Whether the supervisor, or the user's environment, chose the location instead of the script."""
        return bool(self.settings.location)


def verify_policy(text: str) -> Verify:
    """Parse `auto`, `strict` or `off`.

    Raises:
        ValueError: The text is none of these.
    """
    for known in get_args(Verify):
        if text == known:
            return cast(Verify, known)
    raise ValueError(f"{VERIFY_ENV}={text!r} is not allowed; use {', '.join(get_args(Verify))}")


def resume_policy(text: str) -> str | int:
    """Parse `auto`, `never`, or the number of a step.

    Raises:
        ValueError: The text is none of these.
    """
    if text in ("auto", "never"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise ValueError(f"resume {text!r} is not allowed; use auto, never, or the number of a committed step")
