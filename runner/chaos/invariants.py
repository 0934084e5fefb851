"""What must hold after every fault and at the end of a run.

The checks read storage and the journal only. Each returns the violations that it finds, in words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from checkpointing.agent.events import Committed, Resumed, TrainingStarted
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from runner.journal.events import Backoff, Entry, RunEnded, RunStarted
from runner.journal.summary import summarise

# Share of the wall time by which the sum of all causes may differ from it.
_LEDGER_TOLERANCE = 0.001
# Caches that torch keeps on purpose, and folders that wandb makes on import and removes unless it is killed.
_OF_OTHERS = re.compile(r"torchinductor_|\w+wandb-(media|artifacts)$")


def newest_is_intact(tiers: Tiers, damaged: set[int]) -> list[str]:
    """Check that the newest committed checkpoint that the campaign has not damaged has all its files, undamaged."""
    last = ""
    # Retention may remove a checkpoint while it is being read; then there is a newer one to look at.
    for _ in range(5):
        try:
            steps = tiers.catalog.committed_steps()
            if not steps:
                return []
            if steps[-1] in damaged:
                # No attempt has read it yet; the next one will quarantine it.
                steps = [step for step in steps if step not in damaged]
                if not steps:
                    return []
            tiers.catalog.verify(steps[-1])
            return []
        except InvalidCheckpoint as error:
            last = str(error)
        except CheckpointError as error:
            return [f"the newest checkpoint cannot be read: {error}"]
    return [f"the newest checkpoint is not intact: {last}"]


def nothing_acknowledged_is_lost(entries: Sequence[Entry], damaged: Sequence[tuple[int, int]]) -> list[str]:
    """Check that every attempt resumed from the newest acknowledged checkpoint, or from a newer snapshot.

    `damaged` has (number of entries at that time, step) of each checkpoint that the campaign damaged.
    """
    wrong: list[str] = []
    acknowledged: set[int] = set()
    # The agent writes `resumed`, a rank `training_started`, so either may come first.
    resumed = {entry.attempt: entry.event.step for entry in entries if isinstance(entry.event, Resumed)}
    harmed = list(damaged)
    for number, entry in enumerate(entries):
        while harmed and harmed[0][0] <= number:
            acknowledged.discard(harmed.pop(0)[1])
        match entry.event:
            case Committed(step=step):
                acknowledged.add(step)
            case TrainingStarted(step=begun):
                newest = max(acknowledged, default=0)
                if begun < newest:
                    wrong.append(f"attempt {entry.attempt} began at step {begun}; step {newest} had been committed")
                recorded = resumed.get(entry.attempt, 0)
                if begun != recorded:
                    wrong.append(
                        f"attempt {entry.attempt} began at step {begun}; the journal says resumed at {recorded}"
                    )
                # Steps after this one are recomputed and committed once more.
                acknowledged = {step for step in acknowledged if step <= begun}
    return wrong


def restarts_match(entries: Sequence[Entry], at_least: int, at_most: int, sessions: int) -> list[str]:
    """Check that the journal has as many sessions, and as many restarts as the faults account for."""
    wrong = []
    restarts = sum(isinstance(entry.event, Backoff) for entry in entries)
    if not at_least <= restarts <= at_most:
        expected = str(at_least) if at_least == at_most else f"{at_least} to {at_most}"
        wrong.append(f"the journal has {restarts} restarts, the faults account for {expected}")
    found = sum(isinstance(entry.event, RunStarted) for entry in entries)
    if found != sessions:
        wrong.append(f"the journal has {found} sessions of the runner, there were {sessions}")
    return wrong


def exit_code_matches_journal(entries: Sequence[Entry], pid: int, code: int) -> list[str]:
    """Check that a runner that ended by itself (no negative code) exited with the code in its journal.

    A runner that was stopped early may have no events there.
    """
    events = [entry.event for entry in entries]
    begun = [number for number, event in enumerate(events) if isinstance(event, RunStarted) and event.pid == pid]
    if code < 0 or not begun:
        return []
    recorded = [event.exit_code for event in events[begun[-1] :] if isinstance(event, RunEnded)][:1]
    return (
        []
        if recorded == [code]
        else [f"the runner ended with {code}; its journal says {recorded[0] if recorded else 'nothing'}"]
    )


def ledger_adds_up(entries: Sequence[Entry]) -> list[str]:
    """Check that every second of the wall time belongs to one cause."""
    if not entries:
        return []
    wall = entries[-1].time - entries[0].time
    summary = summarise(entries)
    if abs(summary.wall_s - wall) > max(_LEDGER_TOLERANCE * wall, 0.01):
        return [f"the ledger's causes sum to {summary.wall_s:.3f} s of {wall:.3f} s"]
    return []


def nothing_is_left(tiers: Tiers, temporary: Path, shared_memory: Collection[Path]) -> list[str]:
    """Check that nothing is left in storage, in the temporary folder, and of the shared memory that was mapped."""
    wrong = []
    for storage in tiers.nearest_first:
        if storage.root is not None:
            # Quarantined checkpoints and the fence are there on purpose.
            left = [path.name for path in storage.root.iterdir() if ".tmp" in path.name]
            wrong += [f"{storage.root}: {name} is left over" for name in left]
    wrong += [f"{path} is left over" for path in sorted(temporary.iterdir()) if not _OF_OTHERS.match(path.name)]
    return wrong + [f"{path} is left over" for path in sorted(shared_memory) if path.exists()]


def acknowledged_is_there(acknowledged: int, committed: Sequence[int]) -> list[str]:
    """Check that the newest acknowledged step (-1 if there is none), or a newer one, is among the committed ones."""
    newest = max(committed, default=-1)
    if newest >= acknowledged:
        return []
    return [f"step {acknowledged} was acknowledged, and the newest checkpoint is that of step {newest}"]


def one_writer(by_node: Mapping[int, Sequence[Entry]]) -> list[str]:
    """Check that no attempt has checkpoints of two nodes.

    A snapshot of an earlier attempt may be on several nodes, with the same bits. The fence names it by step and attempt
    when the next attempt begins, and accepts it from the first of them, also from a leader that has been replaced.
    `by_node` has what each node has recorded while it led, by node rank.
    """
    writers: dict[int, set[int]] = {}
    for rank, entries in by_node.items():
        for entry in entries:
            event = entry.event
            if isinstance(event, Committed) and event.snapshot_attempt in (None, entry.attempt):
                writers.setdefault(entry.attempt, set()).add(rank)
    return [
        f"nodes {sorted(ranks)} have both committed in attempt {attempt}"
        for attempt, ranks in sorted(writers.items())
        if len(ranks) > 1
    ]
