"""What must hold after every fault, and at the end of a run, whatever was done to it. All by what lies there and by the
journal; each check returns what it finds wrong, in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.tiers import Tiers
from runner.journal.journal import Event
from runner.journal.summary import summarise

# Shares of the wall time, and seconds.
_LEDGER_TOLERANCE = 0.001
# torch's own, for whatever runs next; and what wandb makes when it is imported, and removes unless it is killed.
_OF_OTHERS = re.compile(r"torchinductor_|\w+wandb-(media|artifacts)$")


def newest_is_whole(tiers: Tiers, damaged: set[int]) -> list[str]:
    """The newest checkpoint that counts has all its files, with their digests."""
    last = ""
    # Retention may remove one while it is being read; then there is a newer one.
    for _ in range(5):
        try:
            steps = tiers.catalog.committed_steps()
            if not steps:
                return []
            if steps[-1] in damaged:
                # Nobody has looked at it yet; the next attempt will set it aside.
                steps = [step for step in steps if step not in damaged]
                if not steps:
                    return []
            tiers.catalog.verify(steps[-1])
            return []
        except InvalidCheckpoint as error:
            last = str(error)
        except CheckpointError as error:
            return [f"the newest checkpoint cannot be read: {error}"]
    return [f"the newest checkpoint is not whole: {last}"]


def nothing_acknowledged_is_lost(events: Sequence[Event], damaged: Sequence[tuple[int, int]]) -> list[str]:
    """Every attempt goes on from the newest checkpoint that was acknowledged before, or from a newer snapshot.

    Args:
        damaged: (number of the events there were then, step) of each checkpoint that was damaged.
    """
    wrong: list[str] = []
    acknowledged: set[int] = set()
    # By who says it, these two come by two ways: either may be the first.
    resumed = {event["attempt"]: event["step"] for event in events if event["event"] == "resumed"}
    harmed = list(damaged)
    for number, event in enumerate(events):
        while harmed and harmed[0][0] <= number:
            acknowledged.discard(harmed.pop(0)[1])
        match event["event"]:
            case "committed":
                acknowledged.add(event["step"])
            case "training_started":
                begun, newest = event["step"], max(acknowledged, default=0)
                if begun < newest:
                    wrong.append(f"attempt {event['attempt']} began at step {begun}; step {newest} had been committed")
                told = resumed.get(event["attempt"], 0)
                if begun != told:
                    wrong.append(
                        f"attempt {event['attempt']} began at step {begun}; the journal says resumed at {told}"
                    )
                # What was ahead and is done again will be committed again.
                acknowledged = {step for step in acknowledged if step <= begun}
    return wrong


def restarts_are_those_injected(events: Sequence[Event], at_least: int, at_most: int, lives: int) -> list[str]:
    """Restarts of attempts in the journal, and lives of the supervisor."""
    wrong = []
    restarts = sum(event["event"] == "backoff" for event in events)
    if not at_least <= restarts <= at_most:
        expected = str(at_least) if at_least == at_most else f"{at_least} to {at_most}"
        wrong.append(f"the journal tells of {restarts} restarts, the faults were for {expected}")
    told = sum(event["event"] == "run_started" for event in events)
    if told != lives:
        wrong.append(f"the journal tells of {told} lives of the runner, there were {lives}")
    return wrong


def exit_code_is_the_journals(events: Sequence[Event], pid: int, code: int) -> list[str]:
    """A runner that has ended by itself ends with the code that its journal tells.

    Args:
        events: of the run; a runner that was stopped before it had anything to tell has none.
        pid, code: of the runner's process.
    """
    begun = [number for number, event in enumerate(events) if event["event"] == "run_started"]
    begun = [number for number in begun if events[number]["pid"] == pid]
    if code < 0 or not begun:
        return []
    told = [event["exit_code"] for event in events[begun[-1] :] if event["event"] == "run_ended"][:1]
    return (
        [] if told == [code] else [f"the runner ended with {code}; its journal says {told[0] if told else 'nothing'}"]
    )


def ledger_adds_up(events: Sequence[Event]) -> list[str]:
    """Every second of the wall time belongs to one cause."""
    if not events:
        return []
    wall = events[-1]["time"] - events[0]["time"]
    summary = summarise(events)
    if abs(summary.wall_s - wall) > max(_LEDGER_TOLERANCE * wall, 0.01):
        return [f"the ledger's causes sum to {summary.wall_s:.3f} s of {wall:.3f} s"]
    return []


def nothing_is_left(tiers: Tiers, temporary: Path, shared_memory: Collection[Path]) -> list[str]:
    """No temporary data where checkpoints lie, none in the temporary folder, no named shared memory.

    Args:
        shared_memory: files in /dev/shm that the training's processes have had mapped.
    """
    wrong = []
    for storage in tiers.nearest_first:
        if storage.root is not None:
            # What is set aside, and the files that say who may write, are there on purpose.
            left = [path.name for path in storage.root.iterdir() if ".tmp" in path.name]
            wrong += [f"{storage.root}: {name} is left over" for name in left]
    wrong += [f"{path} is left over" for path in sorted(temporary.iterdir()) if not _OF_OTHERS.match(path.name)]
    return wrong + [f"{path} is left over" for path in sorted(shared_memory) if path.exists()]
