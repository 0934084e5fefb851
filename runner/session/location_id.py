"""The identity of a checkpoint location, so that a run does not continue at an empty or another one.

A volume that is not mounted looks like an empty folder, and training would begin again at step 0. Therefore each
location gets an id (`place.json`), which the journal records, and steps that the journal has as committed must exist.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.agent.events import Committed, StageEntered, TrainingStarted
from checkpointing.commit.tiers import Tiers
from checkpointing.storage import Storage
from runner.errors import CheckpointsMissing
from runner.journal.events import AttemptStarted, Entry, RunStarted

RECORD_NAME = "place.json"


@dataclass(frozen=True)
class Remembered:
    """What a journal says about the location.

    Attributes:
        place: Id of the last location; None in journals that are older than these ids.
        step: Newest step committed there, without steps that were given up by going back; None if there is none.
    """

    place: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Found:
    """What is at a location.

    Attributes:
        place: Its id; None if it has none.
        newest: Newest valid step at any tier; None if there is none.
        is_empty: Whether no tier has a checkpoint, valid or not.
        quarantined: Whether the remembered step is damaged here; the ranks quarantine it and report why.
    """

    place: str | None
    newest: int | None
    is_empty: bool
    quarantined: bool = False


def remember(entries: Sequence[Entry], tier: str) -> Remembered:
    """Fold the entries of a journal, oldest first; `tier` is its name of the durable tier."""
    place: str | None = None
    committed: set[int] = set()
    # Later trainings of a script have folders of their own; only the steps of the first one count here.
    in_later_stage = False
    for entry in entries:
        match entry.event:
            case AttemptStarted():
                in_later_stage = False
            case StageEntered():
                in_later_stage = True
            case RunStarted(place=str(found)):
                place = found
            case Committed(step=step, tier=committed_to, stage=None) if committed_to == tier:
                committed.add(step)
            case TrainingStarted(step=step) if not in_later_stage:
                # Newer steps were given up: they were damaged, or the user went back.
                committed = {other for other in committed if other <= step}
            case _:
                pass
    return Remembered(place, max(committed, default=None))


def look(tiers: Tiers, step: int | None) -> Found:
    """Return what is at a run's location, where a step is remembered or None; OSError if storage refuses."""
    committed = tiers.catalog.committed_steps()
    aside = [name for storage in tiers.nearest_first for name in storage.quarantined()]
    steps = {number for storage in tiers.nearest_first for number in storage.steps()}
    # The step exists; if it is not valid, the ranks report why.
    known = step in steps or any(re.match(rf"checkpoint-{step}[./]", name) for name in aside)
    return Found(read_id(tiers.durable), max(committed, default=None), not aside and not steps, known)


def compare(remembered: Remembered, found: Found, location: str) -> str | None:
    """Decide whether a run may continue at a location; return what the user should know, None if there is nothing.

    Raises:
        CheckpointsMissing: It is another location, or an empty one.
    """
    step = remembered.step
    if step is None:
        return None
    is_other = remembered.place is not None and found.place != remembered.place
    if found.newest is not None and found.newest >= step:
        # The checkpoints were moved there.
        if not is_other:
            return None
        return f"checkpoint.location={location!r} is a new location for this run; it holds step {step}"
    if is_other or found.is_empty:
        what = "holds no checkpoint" if found.is_empty else f"is another location and does not hold step {step}"
        raise CheckpointsMissing(
            f"checkpoint.location={location!r} {what}, but this run's journal says that step {step} was committed; "
            "mount the volume or correct checkpoint.location, or start over with --resume never --overwrite"
        )
    if found.newest is None or found.quarantined:
        return None
    return (
        f"warning: the checkpoint of step {step} was committed but is missing at {location}; resuming from step "
        f"{found.newest}"
    )


def read_id(storage: Storage) -> str | None:
    """Return the id of the durable tier; None if it has none, or a damaged one. OSError if storage refuses."""
    try:
        place = json.loads(storage.sidecars.read(RECORD_NAME))["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return place if isinstance(place, str) and re.fullmatch(r"[0-9a-f]{32}", place) else None


def ensure_id(storage: Storage) -> str:
    """Return the id of the durable tier, which gets one if it has none; OSError if storage refuses."""
    place = read_id(storage)
    if place is None:
        place = uuid.uuid4().hex
        storage.sidecars.write(RECORD_NAME, json.dumps({"id": place}).encode() + b"\n")
    return place
