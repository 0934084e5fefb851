"""Events of the checkpoint agent and the ranks: recorded, shown to the user, and kept for decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from checkpointing.agent.events import (
    BatchShape,
    CheckpointQuarantined,
    CommitFailedEvent,
    Committed,
    Event,
    FencedEvent,
    Fetched,
    FetchFailed,
    Log,
    MemoryShort,
    PruneFailed,
    Resumed,
    SlowRanks,
    SnapshotDamaged,
    SnapshotDropped,
    StageEntered,
    StepsRepeated,
    StorageRetried,
    TierUnreachable,
    TrainingStarted,
    Transfer,
)
from checkpointing.host.heartbeat import Heartbeat, Phase
from runner.journal.events import ProgramSaved, Progress, Record, parse_event
from runner.journal.summary import describe_slow_ranks
from runner.ui.progress import ProgressDisplay

_PROGRESS_EVERY_S = 10.0


class AgentEvents:
    """The state of a node's checkpoints, as a fold over the events of its agent.

    Attributes:
        committed_step: Newest step that this node's agent has committed or found; -1 before the first.
        batch: How the ranks say that they divide a step; None before that.
        fenced: Why no attempt of this runner may write any longer; None while it may.
        commit_s: Seconds that the last commit took; None before the first.
        damaged: Why snapshots were found to be damaged in this node's memory, in this session.
        total_steps: Step at which the training of the running attempt ends; None if it is not known.
        slow: Which ranks of the running attempt compute more slowly than the others; None if none was found yet.
        program_start: Step that a program with checkpoints of its own has loaded in the running attempt.
        program_step: The newest step that it has loaded or saved there.
        program_saves: Whether it has checkpoints of its own.
    """

    def __init__(self, display: ProgressDisplay, record: Record) -> None:
        self._display, self._record = display, record
        self.committed_step = -1
        self.batch: BatchShape | None = None
        self.fenced: str | None = None
        self.commit_s: float | None = None
        self.newest_commit = -1
        self.total_steps: int | None = None
        self.slow: SlowRanks | None = None
        self.damaged: list[str] = []
        # By tier: saves that failed since the last successful one, and why the newest did.
        self._failed_saves: dict[str, tuple[int, str]] = {}
        # The newest step that was recorded from heartbeats, and when.
        self._recorded_step, self._recorded_at = 0, 0.0
        self.program_start = self.program_step = 0
        self.program_saves = False

    @property
    def failed_saves(self) -> tuple[int, str]:
        """Failed saves in a row, of the tier that has most of them, and why the last one failed."""
        return max(self._failed_saves.values(), default=(0, ""))

    def begin_attempt(self, number: int) -> None:
        """Forget what the attempt before this one reported."""
        # The next one may end before it reports.
        self.batch = self.slow = self.total_steps = None
        # Only a leader that was outpaced begins another attempt then.
        self.fenced = None
        self._recorded_step, self._recorded_at = 0, 0.0
        self.program_start = self.program_step = 0
        state = self._display.state
        state.attempt, state.activity, state.trains = number, "loading libraries, and starting the ranks", False

    def show_heartbeats(self, beats: Iterable[Heartbeat], now: float) -> None:
        """Show the progress of the ranks, and record it every 10 s: a script may log seldom, or nothing."""
        state, beats = self._display.state, list(beats)
        phases = {beat.phase for beat in beats}
        begun = [beat for beat in beats if beat.start_time]
        if begun:
            step = max(beat.step for beat in begun)
            state.trains = step > begun[0].start_step
            what = "torch.compile, in the first step" if Phase.COMPILING in phases else f"computing step {step + 1}"
            state.step, state.activity = step, f"step {step}" if state.trains else what
            if step != self._recorded_step and now - self._recorded_at >= _PROGRESS_EVERY_S:
                self._recorded_step, self._recorded_at = step, now
                self._record(Progress(step=step))
        elif Phase.RESTORING in phases:
            state.activity = "restoring the newest checkpoint"
        self._display.refresh()

    def handle(self, event: Event) -> None:
        """Handle an event of this node's agent."""
        if isinstance(event, Transfer):
            self._display.state.show_transfer(event)
            return
        self._record(event)
        self._act_on(event)
        self._show_training(event)

    def handle_program(self, report: Mapping[str, Any]) -> None:
        """Handle what a program's own checkpoints have come to; what cannot be read is dropped."""
        details = {name: value for name, value in report.items() if name != "event"}
        event = parse_event(str(report.get("event")), details)
        if isinstance(event, Committed):
            # Not a checkpoint of the run: nothing looks for it where those are.
            self.program_saves, self.program_step = True, max(self.program_step, event.step)
            self._display.state.committed_step = event.step
            self._failed_saves.pop(event.tier, None)
            saved = ProgramSaved(step=event.step, tier=event.tier, nbytes=event.nbytes, duration_s=event.duration_s)
            self._record(saved)
        elif isinstance(event, Resumed):
            self.program_saves, self.program_start, self.program_step = True, event.step, event.step
            self.handle(event)
        elif isinstance(event, CommitFailedEvent | CheckpointQuarantined):
            self.handle(event)

    def handle_forwarded(self, event: Event) -> None:
        """Handle what rank 0 or an agent of another node has reported, as if it had been reported here."""
        if isinstance(event, BatchShape):
            self.batch = event
            return
        self._record(event)
        self._show_training(event)

    def _act_on(self, event: Event) -> None:  # noqa: C901 - A table of events.
        say = self._display.message
        if isinstance(event, Committed | CommitFailedEvent | Fetched | FetchFailed):
            self._display.state.transfer = ""
        match event:
            case BatchShape():
                self.batch = event
            case Committed():
                self._failed_saves.pop(event.tier, None)
                self.commit_s, self.newest_commit = event.duration_s, event.step
                self.committed_step = max(self.committed_step, event.step_of_run)
                self._display.state.committed_step = event.step
            case StageEntered(number=number, stage=stage):
                say(f"stage {number} of the script begins: its checkpoints are in {stage}")
            case CommitFailedEvent(step=step, tier=tier, error=error):
                count, _ = self._failed_saves.get(tier, (0, ""))
                self._failed_saves[tier] = (count + 1, error)
                say(f"checkpoint of step {step} failed: {error}")
            case TierUnreachable(tier=tier, reason=reason):
                say(f"the {tier} checkpoints cannot be reached: {reason}")
            case StorageRetried(tier=tier, count=count, reason=reason):
                say(f"retried {count} storage calls ({tier} checkpoints); the last one failed with: {reason}")
            case PruneFailed(tier=tier, error=error, steps=steps, held_bytes=nbytes) if steps:
                names = ", ".join(f"checkpoint-{step}" for step in steps[:3]) + (", …" if steps[3:] else "")
                say(f"{names} ({tier}, {nbytes / 1e9:,.1f} GB) cannot be removed, others are: {error}")
            case Fetched(step=step, nbytes=nbytes, duration_s=seconds):
                say(f"read checkpoint-{step} into memory: {nbytes / 1e6:,.1f} MB in {seconds:.1f} s")
            case FencedEvent(reason=reason):
                self.fenced = reason
            case MemoryShort(reason=reason):
                say(f"memory for snapshots is short: {reason}")
            case SnapshotDamaged(step=step, reason=reason) | SnapshotDropped(step=step, reason=reason) if reason:
                self.damaged += [reason] if isinstance(event, SnapshotDamaged) else []
                say(f"the snapshot of step {step} is not used: {reason}")
            case CheckpointQuarantined(step=step, reason=reason, kept_as=kept_as):
                say(f"checkpoint-{step} is not used: {reason}; kept as {kept_as}")
            case _:
                pass

    def _show_resumption(self, event: Resumed) -> None:
        state = self._display.state
        if event.source != "memory":
            # What was newer is quarantined.
            state.committed_step = event.step
        lost = state.step - event.step
        source = "in-memory snapshot" if event.source == "memory" else f"{event.source} checkpoint"
        again = f"; recomputing {lost} steps" if lost > 0 else ""
        self._display.message(f"attempt {state.attempt} resumed from step {event.step} ({source}){again}")
        state.step = event.step

    def _show_training(self, event: Event) -> None:
        state = self._display.state
        match event:
            case Resumed():
                self._show_resumption(event)
            case TrainingStarted(total_steps=total_steps):
                state.total_steps = self.total_steps = total_steps
            case Log():
                state.loss = event.loss
                state.tokens_per_s = event.metric("tokens_per_s") or state.tokens_per_s
            case StepsRepeated():
                self._display.message(event.describe())
            case SlowRanks():
                self.slow = event
                self._display.message(describe_slow_ranks(event))
            case _:
                pass
