"""Events that ranks and the checkpoint agent report to the supervisor of the run.

An event crosses process boundaries as one JSON object: its name under ``event``, and its fields without those that are
None. A supervisor appends it to its journal. Names and fields are a file format: a journal that an older version wrote
must stay readable, so renaming one needs an entry in ``runner.journal.events``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from checkpointing.format.step_record import GENERATORS


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; a subclass gives its name as ``class Committed(Event, name="committed")``.

    Attributes:
        name: The event's name in messages and journals.
        known: All event classes that have been defined, by name.
    """

    name: ClassVar[str] = ""
    known: ClassVar[dict[str, type[Event]]] = {}
    # Readers of journals validate events with pydantic, if they have it. JSON has neither infinities nor NaN.
    __pydantic_config__: ClassVar[dict[str, bool]] = {"allow_inf_nan": False}

    def __init_subclass__(cls, *, name: str = "") -> None:
        super().__init_subclass__()
        if name:
            cls.name = name
            Event.known[name] = cls

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a JSON object."""
        values = ((own.name, getattr(self, own.name)) for own in fields(self))
        return {"event": self.name} | {name: value for name, value in values if value is not None}


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """An event that concerns one step.

    Attributes:
        step: Optimizer step, counted within its stage.
        run_step: The same step counted over all stages; None in a run's first stage.
        stage: Name of the stage; None in a run's first stage.
    """

    step: int
    run_step: int | None = None
    stage: str | None = None

    @property
    def step_of_run(self) -> int:
        """The step counted over all stages."""
        return self.step if self.run_step is None else self.run_step


@dataclass(frozen=True, kw_only=True)
class MeasuredEvent(StepEvent):
    """A step with measured values, which are fields of the JSON object of their own.

    Attributes:
        metrics: Finite numbers by name.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a JSON object; a metric cannot replace a field."""
        values = super().to_dict()
        return {**values.pop("metrics"), **values}

    def metric(self, name: str) -> float | None:
        """Return a metric, or None where it was not measured."""
        return self.metrics.get(name)


# Of a step that differs: what that is called, and what has probably led to it.
_DIFFERENCES = {
    "batch": ("the batch", "The position in the data, or what samples are made from, was not restored"),
    **{
        name: (f"the generators ({name})", "Their state was not restored, or something else draws from them")
        for name in GENERATORS
    },
    "loss": (
        "the loss",
        "Something that the loss depends on was not restored: weights, buffers, a counter or an average of the script",
    ),
    "gradient_norm": ("the gradient norm", "Something that the gradients depend on was not restored"),
    "loss_scale": ("the scale of the gradient scaler", "The scaler was not restored"),
    "learning_rate": ("the learning rate", "The scheduler was not restored, or the script was changed"),
    "parameters": (
        "the parameters after the step",
        "Something that an update depends on was not restored: the optimizer's state, or what is trained",
    ),
}


# Reported by ranks:
@dataclass(frozen=True, kw_only=True)
class TrainingStarted(StepEvent, name="training_started"):
    """A training loop is about to compute its first step after `step`.

    Attributes:
        total_steps: Step at which it ends; None if unknown.
    """

    total_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resumed(StepEvent, name="resumed"):
    """The ranks chose a step to resume from.

    Attributes:
        source: ``memory``, or the tier of the checkpoint (``local``, ``remote``).
    """

    source: str


@dataclass(frozen=True, kw_only=True)
class Restored(StepEvent, name="restored"):
    """Rank 0 finished restoring, which took `seconds`: to choose, read and load the checkpoint or snapshot."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepsRepeated(StepEvent, name="steps_repeated"):
    """A resumed run has computed steps again, and compared them with the record of their first computation.

    Attributes:
        first: First step that was compared.
        last: Last one that is equal on all ranks; `first - 1` where there is none.
        differs: What differs in the step after it, by the names in `step_record.FIELDS`, the cause first; empty where
            nothing does.
        rank: First rank on which something differs.
        by_itself: The step has now been computed three times with three results from equal input: the training is not
            deterministic.
        candidates: What was probably not restored.
    """

    first: int
    last: int
    differs: list[str] = field(default_factory=list)
    rank: int | None = None
    by_itself: bool = False
    candidates: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the report as a line of text."""
        start = f"resumed from step {self.step}; "
        equal = f"steps {self.first}\u2013{self.last}" if self.last > self.first else f"step {self.first}"
        repeated = f"{equal} repeated bit for bit"
        if not self.differs:
            return start + repeated
        what, cause = _DIFFERENCES.get(self.differs[0], (self.differs[0], ""))
        text = start + (f"{repeated}, and " if self.last >= self.first else "")
        text += f"step {self.last + 1} differs (rank {self.rank}): {what}. "
        if self.by_itself:
            return text + "It had other bits each time, from equal input: this training is not deterministic by itself"
        text += f"{cause}. " if cause else ""
        if self.candidates:
            text += f"In no checkpoint, and changed by training: {', '.join(self.candidates)}. "
        return text + "See docs/guides/resume-proof.md"


@dataclass(frozen=True, kw_only=True)
class Log(MeasuredEvent, name="log"):
    """Rank 0's measurements of a training step, with its training loss."""

    loss: float


@dataclass(frozen=True, kw_only=True)
class BegunWithWeights(Event, name="begun_with_weights"):
    """Training begins with the weights of another run, or of any model, and with nothing else of it.

    Attributes:
        folder: Where they are.
        loaded: Number of tensors.
        missing: Number of the model's tensors that were not there.
        unused: Number of those there that the model does not have.
    """

    folder: str
    loaded: int
    missing: int = 0
    unused: int = 0


@dataclass(frozen=True, kw_only=True)
class SlowRanks(Event, name="slow_ranks"):
    """Other ranks than before are slower than the rest, by what they do by themselves in 50 steps.

    Attributes:
        ranks: Which ones; empty if there are none any more.
        ratios: How many times as long as the median rank each of them needs, at least 1.3.
        nodes: Node rank of each of them.
        between_steps: Those of them that lose the time between two steps, where data is drawn; the others lose it in
            their forward passes.
    """

    ranks: list[int]
    ratios: list[float]
    nodes: list[int]
    between_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.ranks) == len(self.ratios) == len(self.nodes):
            raise ValueError("ranks, ratios and nodes differ in number")


@dataclass(frozen=True, kw_only=True)
class Evaluated(MeasuredEvent, name="evaluated"):
    """Rank 0's measurements of an evaluation; its metrics begin with ``eval_``.

    Attributes:
        best_by: Name of the metric by which the trainer chooses its best step; None for the loss.
        higher_is_better: Whether it prefers high values of this metric; None for the loss.
    """

    best_by: str | None = None
    higher_is_better: bool | None = None


@dataclass(frozen=True, kw_only=True)
class BatchShape(Event, name="batch_shape"):
    """How ranks divide their share of a global batch.

    Attributes:
        micro_batch: Samples of one forward and backward pass.
        accumulation: Micro-batches of one step.
        samples: Samples of a step that any number of ranks can share; None if they must divide it.
        model_ranks: Ranks that compute the same samples together (tensor parallelism).
    """

    micro_batch: int
    accumulation: int
    samples: int | None = None
    model_ranks: int = 1

    def __post_init__(self) -> None:
        numbers = self.micro_batch, self.accumulation, self.model_ranks, 1 if self.samples is None else self.samples
        if min(numbers) < 1:  # Another node may have sent it.
            raise ValueError(f"not a batch shape: {self}")


@dataclass(frozen=True, kw_only=True)
class SnapshotCost(StepEvent, name="snapshot_cost"):
    """The measured price of a snapshot.

    Attributes:
        blocked_s: Seconds that training waited.
        copy_s: Seconds that the copy took.
        cost_s: Seconds that the snapshot cost training in total.
        overlapped: Whether the copy ran alongside training.
    """

    blocked_s: float
    copy_s: float = 0.0
    cost_s: float = 0.0
    overlapped: bool = True


@dataclass(frozen=True, kw_only=True)
class Pinned(Event, name="pinned"):
    """Memory for snapshots was pinned.

    Attributes:
        nbytes: Bytes pinned.
        seconds: Time it took.
        complete: Whether all of the arena was pinned.
    """

    nbytes: int
    seconds: float
    complete: bool


# Reported by the agent:
@dataclass(frozen=True, kw_only=True)
class StageEntered(Event, name="stage"):
    """The script began another training with checkpoints of its own.

    Attributes:
        stage: Name of the stage.
        number: Its number, from 1.
        steps_before: Steps of all stages before it.
    """

    stage: str
    number: int
    steps_before: int = 0


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken(StepEvent, name="snapshot"):
    """Every rank of the node copied its part: the snapshot is whole.

    Attributes:
        to_be_committed: Whether it will be written to storage.
    """

    to_be_committed: bool


@dataclass(frozen=True, kw_only=True)
class SnapshotUnused(StepEvent):
    """A snapshot that is not kept.

    Attributes:
        reason: Why; empty where nobody needs to know.
    """

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SnapshotSkipped(SnapshotUnused, name="snapshot_skipped"):
    """No memory was free for a snapshot, or the ranks held different values where nobody had asked for one."""


@dataclass(frozen=True, kw_only=True)
class SnapshotDropped(SnapshotUnused, name="snapshot_dropped"):
    """A snapshot was discarded before it was whole, or because a start from it could not be committed."""


@dataclass(frozen=True, kw_only=True)
class SnapshotDamaged(SnapshotUnused, name="snapshot_damaged"):
    """A snapshot's bytes differ from their digest; it is neither offered nor published."""


@dataclass(frozen=True, kw_only=True)
class NotFiniteKept(StepEvent, name="not_finite_kept"):
    """A state that is not finite was kept for a post-mortem; nothing resumes from it.

    Attributes:
        where: The folder or URL that holds it.
        tensors: Names of tensors of it that hold NaN or infinity.
    """

    where: str
    tensors: list[str]


@dataclass(frozen=True, kw_only=True)
class MemoryShort(Event, name="memory_short"):
    """There is memory for fewer than two snapshots: for `arenas` of them; `reason` says why."""

    arenas: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Committed(StepEvent, name="committed"):
    """A checkpoint was published, and is durable.

    Attributes:
        tier: ``local`` or ``remote``.
        nbytes: Size of all its files.
        duration_s: Seconds from a whole snapshot (or from the begin of an upload) to the published checkpoint.
        cpu_s: Processor seconds of the process that wrote it meanwhile.
        snapshot_attempt: Attempt that made the snapshot; a later one may commit it.
        nodes: How many nodes wrote it, if several did.
        alone: Why one node wrote it alone, where several should have.
    """

    tier: str = "local"
    nbytes: int | None = None
    duration_s: float | None = None
    cpu_s: float | None = None
    snapshot_attempt: int | None = None
    nodes: int | None = None
    alone: str | None = None


@dataclass(frozen=True, kw_only=True)
class CommitFailedEvent(StepEvent, name="commit_failed"):
    """A checkpoint could not be published in a tier (``local`` or ``remote``); `error` says why."""

    tier: str = "local"
    error: str


@dataclass(frozen=True, kw_only=True)
class Pruned(StepEvent, name="pruned"):
    """Retention removed a checkpoint from a tier (``local`` or ``remote``)."""

    tier: str = "local"


@dataclass(frozen=True, kw_only=True)
class TierFailure(Event):
    """Something other than a commit failed at a tier.

    Attributes:
        tier: ``local`` or ``remote``.
        error: Why.
    """

    tier: str
    error: str


@dataclass(frozen=True, kw_only=True)
class PruneFailed(TierFailure, name="prune_failed"):
    """Retention could not remove checkpoints; it goes on around them, and tries them again later.

    Attributes:
        steps: Steps of all that could not be removed since this runner started.
        held_bytes: Size of their files.
    """

    steps: list[int] = field(default_factory=list)
    held_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RestartStateFailed(TierFailure, name="restart_state_failed"):
    """The run's restart state, or another file kept with the checkpoints, could not be written."""


@dataclass(frozen=True, kw_only=True)
class CheckpointQuarantined(StepEvent, name="checkpoint_quarantined"):
    """A checkpoint was found to be invalid and was renamed, so that nothing loads it.

    Attributes:
        reason: What is wrong with it.
        kept_as: Where its files are kept.
    """

    reason: str = ""
    kept_as: str


@dataclass(frozen=True, kw_only=True)
class Fetched(StepEvent, name="fetched"):
    """A checkpoint was read into memory for all ranks of the node.

    Attributes:
        tier: Where it was read from.
        nbytes: Size of all its files.
        duration_s: Seconds it took.
    """

    tier: str
    nbytes: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class FetchFailed(StepEvent, name="fetch_failed"):
    """A checkpoint could not be read into memory because of an error; the ranks will read it themselves."""

    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Transfer(StepEvent, name="transfer"):
    """Progress of an upload or a download, for display only.

    Attributes:
        what: ``upload`` or ``download``.
        done: Bytes transferred.
        total: Bytes to transfer.
    """

    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class TierUnreachable(Event, name="tier_unreachable"):
    """A tier does not answer; the run continues without it.

    Attributes:
        tier: ``local`` or ``remote``.
        reason: Why.
    """

    tier: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StorageRetried(Event, name="storage_retried"):
    """Calls to storage failed and were retried.

    Attributes:
        tier: ``local`` or ``remote``.
        count: Calls since the last event of this kind.
        reason: Why the newest one failed.
    """

    tier: str
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class FencedEvent(Event, name="fenced"):
    """A newer attempt has begun elsewhere (`reason` says which one): this one may no longer write."""

    reason: str
