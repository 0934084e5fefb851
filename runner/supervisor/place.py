"""Which place a run's checkpoints are at, so that an empty or another one is not taken for it.

A volume that is not mounted looks like an empty folder, and training would begin again at step 0. So each location gets
an id of its own (`place.json`), the journal keeps it, and what the journal says was committed has to be found there.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.events import Committed, StageEntered, TrainingStarted
from checkpointing.storage import Storage
from checkpointing.tiers import Tiers
from runner.errors import CheckpointsMissing
from runner.journal.events import AttemptStarted, Entry, RunStarted

RECORD_NAME = "place.json"


@dataclass(frozen=True)
class Remembered:
    """What a journal says.

    Attributes:
        place: id of the location that the run was last at; None in journals of before there were such ids.
        step: the newest step committed there, less what was given up by going back; None if there is none.
    """

    place: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Found:
    """What is at a location.

    Attributes:
        place: its id, if it has one.
        newest: the newest step that is whole, at any tier.
        is_empty: there is nothing that is or was a checkpoint, at any tier.
        set_aside: the remembered step was set aside here, or will be, as it is damaged: the ranks say so.
    """

    place: str | None
    newest: int | None
    is_empty: bool
    set_aside: bool = False


def remember(entries: Sequence[Entry], tier: str) -> Remembered:
    """Fold a journal.

    Args:
        entries: All entries, oldest first.
        tier: Name of the durable tier in the journal.
    """
    place: str | None = None
    committed: set[int] = set()
    # A script's later trainings keep their checkpoints in folders of their own; here the first one's count.
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
    """See what is at a run's location.

    Args:
        step: the remembered one.

    Raises:
        OSError: storage refused.
    """
    committed = tiers.catalog.committed_steps()
    aside = [name for storage in tiers.nearest_first for name in storage.quarantined()]
    steps = {number for storage in tiers.nearest_first for number in storage.steps()}
    # There, and not whole: the ranks say what is wrong with it.
    known = step in steps or any(re.match(rf"checkpoint-{step}[./]", name) for name in aside)
    return Found(read_id(tiers.durable), max(committed, default=None), not aside and not steps, known)


def compare(remembered: Remembered, found: Found, location: str) -> str | None:
    """Decide whether a run may go on at a location; returns what the user should know, if anything.

    Raises:
        CheckpointsMissing: it is another place, or an empty one.
    """
    step = remembered.step
    if step is None:
        return None
    is_other = remembered.place is not None and found.place != remembered.place
    if found.newest is not None and found.newest >= step:
        # Nothing is lost: the checkpoints were moved there.
        return (
            f"checkpoint.location={location!r} is a new place for this run; it holds step {step}" if is_other else None
        )
    if is_other or found.is_empty:
        what = "holds no checkpoint" if found.is_empty else f"is another place and does not hold step {step}"
        raise CheckpointsMissing(
            f"checkpoint.location={location!r} {what}, but this run's journal says that step {step} was committed; "
            "mount the volume or correct checkpoint.location, or start over with --resume never --overwrite"
        )
    if found.newest is None or found.set_aside:
        return None
    return (
        f"warning: the checkpoint of step {step} was committed but is missing at {location}; resuming from step "
        f"{found.newest}"
    )


def read_id(storage: Storage) -> str | None:
    """The id of a location; None where it has none, or a damaged one.

    Raises:
        OSError: storage refused.
    """
    try:
        place = json.loads(storage.sidecars.read(RECORD_NAME))["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return place if isinstance(place, str) and re.fullmatch(r"[0-9a-f]{32}", place) else None


def ensure_id(storage: Storage) -> str:
    """Give a location an id, unless it has one; returns it.

    Raises:
        OSError: storage refused.
    """
    place = read_id(storage)
    if place is None:
        place = uuid.uuid4().hex
        storage.sidecars.write(RECORD_NAME, json.dumps({"id": place}).encode() + b"\n")
    return place
