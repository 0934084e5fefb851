"""Properties that hold for every sequence of events, not only for those that a test author thought of.

Each property was seen to fail with the product broken on purpose.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from chaos.stores import MemoryObjects
from contract.support import commit
from helpers.proposals import proposed
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpointing.commit.catalog import Catalog
from checkpointing.commit.retention import Retention, steps_to_remove, steps_to_upload
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CommitConflict, Fenced, InvalidCheckpoint
from checkpointing.format.digest import ALGORITHM, PLAIN
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.fence import Fence
from checkpointing.storage.object_storage import ObjectStorage
from runner.errors import ExitCode
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, BatchDivision, Restart, Stop, decide
from runner.recovery.restart_state import RestartState

STEPS = st.integers(0, 12)
STORAGES: dict[str, Callable[[Path], Storage]] = {
    "local": LocalStorage,
    "remote": lambda folder: ObjectStorage(MemoryObjects()),
}


# -- catalog ---------------------------------------------------------------------------------------------------------


@dataclass
class Copy:
    """What the model knows of a checkpoint."""

    attempt: int
    sizes_right: bool = True
    content_right: bool = True


class CatalogMachine(RuleBasedStateMachine):
    """Attempts that fence each other commit, damage, remove and quarantine checkpoints; the catalog always agrees with
    a dict of steps.
    """

    kind = "local"

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.storage: Storage = STORAGES[self.kind](folder / "store")
        self.model: dict[int, Copy] = {}
        self.attempt = 0
        self.num_quarantined = 0
        # Steps and attempts that counted when a newer attempt began.
        self.accepted: set[tuple[int, int]] = set()
        self.next_attempt()

    def teardown(self) -> None:
        self.stack.close()

    @rule()
    def next_attempt(self) -> None:
        self.accepted |= {(step, copy.attempt) for step, copy in self.model.items() if self.counts(step, copy)}
        self.attempt += 1
        self.storage.begin_attempt(self.attempt)

    @rule()
    def a_number_is_not_used_twice(self) -> None:
        with pytest.raises(Fenced):
            type(self.storage).begin_attempt(self.another(), self.attempt)

    @rule(step=STEPS, behind=st.sampled_from([0, 0, 0, 1, 2]))
    def commit(self, step: int, behind: int) -> None:
        attempt = max(self.attempt - behind, 1)
        present, fenced = self.model.get(step), not self.admits(step, attempt)
        try:
            commit(self.another(), step, attempt, nbytes=4096)
        except Fenced:
            assert fenced
        except CommitConflict:
            assert present is not None and not fenced
            # A copy that does not count, or is not whole, is quarantined; one that counts and is whole never is.
            assert self.counts(step, present) and present.sizes_right
            assert present.attempt != attempt or not present.content_right
        else:
            assert not fenced
            if present == Copy(attempt) and self.counts(step, present):
                return  # The same checkpoint is there already.
            self.num_quarantined += present is not None
            assert present is None or not (self.counts(step, present) and present.sizes_right)
            self.model[step] = Copy(attempt)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), how=st.sampled_from(["cut", "flip", "lose", "manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.alter(step, how)
        copy = self.model[step]
        if how == "flip":
            copy.content_right = not copy.content_right  # It is the same bit every time.
        else:
            copy.sizes_right = False

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.storage.remove(step)
        del self.model[step]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.storage.quarantine(step)
        del self.model[step]
        self.num_quarantined += 1

    @rule()
    def sweep(self) -> None:
        self.storage.sweep()

    @invariant()
    def newest_valid_is_what_the_model_says(self) -> None:
        whole = sorted(step for step, copy in self.model.items() if copy.sizes_right and self.counts(step, copy))
        catalog = Catalog(self.storage)
        assert catalog.committed_steps() == whole
        assert [entry.step for entry in catalog.entries()] == sorted(self.model, reverse=True)
        assert catalog.newest_attempt() == self.attempt
        assert len(self.storage.quarantined()) == self.num_quarantined
        for step, copy in self.model.items():
            if step in whole and copy.content_right:
                assert catalog.verify(step).step == step
            else:
                with pytest.raises(InvalidCheckpoint, match=f"checkpoint-{step}"):
                    catalog.verify(step)

    @rule()
    def resume(self) -> None:
        """Resume from the newest whole checkpoint; newer ones are quarantined; never start over silently."""
        whole = [step for step, copy in self.model.items() if copy.sizes_right and self.counts(step, copy)]
        tiers = Tiers(self.storage)
        proposal = proposed(tiers, lambda message: None)
        passed_over = [step for step in self.model if step > max(whole, default=-1)]
        if proposal.unreachable:
            # Where nothing can be read, the storage is at fault: only what does not count is renamed.
            assert not whole and proposal.condemned
            passed_over = [step for step in passed_over if step not in {one.step for one in proposal.condemned}]
        self.num_quarantined += len(passed_over)
        for step in passed_over:
            del self.model[step]
        if whole:
            assert proposal.step == max(whole)
        else:
            assert proposal.step is None and (proposal.error is not None) == (
                self.num_quarantined > 0 or bool(proposal.condemned)
            )

    # -- inside

    def admits(self, step: int, attempt: int) -> bool:
        return attempt >= self.attempt or (step, attempt) in self.accepted

    def counts(self, step: int, copy: Copy) -> bool:
        return self.admits(step, copy.attempt)

    def another(self) -> Storage:
        """Return the same storage as another process sees it."""
        if isinstance(self.storage, LocalStorage):
            return LocalStorage(self.storage.root)
        assert isinstance(self.storage, ObjectStorage)
        return ObjectStorage(self.storage.store)

    def alter(self, step: int, how: str) -> None:
        if isinstance(self.storage, LocalStorage):
            folder = self.storage.directory(step)
            path = folder / ("manifest.json" if how == "manifest" else "model")
            data = path.read_bytes() if path.exists() else b""
            if how == "lose":
                path.unlink(missing_ok=True)
            elif data:
                path.write_bytes(altered(data, how))
        else:
            assert isinstance(self.storage, ObjectStorage)
            objects = self.storage.store.objects  # type: ignore[attr-defined]
            manifest = objects[f"checkpoint-{step}/manifest.json"]
            if how == "manifest":
                objects[f"checkpoint-{step}/manifest.json"] = altered(manifest, how)
                return
            for key in [key for key in objects if key.startswith(f"checkpoint-{step}/") and key.endswith("/model")]:
                objects[key] = altered(objects[key], how)
                if how == "lose":
                    del objects[key]


def altered(data: bytes, how: str) -> bytes:
    if how == "flip":
        return bytes([data[0] ^ 1]) + data[1:] if data else data
    return data[: len(data) // 2]


class RemoteCatalogMachine(CatalogMachine):
    kind = "remote"


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=20, stateful_step_count=20)
TestRemoteCatalog = RemoteCatalogMachine.TestCase
TestRemoteCatalog.settings = settings(max_examples=20, stateful_step_count=20)


# -- manifest and fence ----------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXT.filter(lambda name: name not in ("", ".", "..", "manifest.json") and not {*name} & {*"/\\\0"})
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(NAMES, max_size=5, unique=True))
    digests = st.builds("{}:{}".format, st.sampled_from([ALGORITHM, PLAIN]), TEXT)
    files = tuple(FileEntry(name, draw(NUMBERS), draw(digests)) for name in names)
    metrics = draw(st.dictionaries(TEXT, FLOATS, max_size=3))
    step, attempt = draw(NUMBERS), draw(NUMBERS)
    folder = draw(st.sampled_from(["", f"checkpoint-{step}/{attempt}.0123456789ab"]))
    return Manifest(draw(TEXT), attempt, step, draw(NUMBERS), draw(NUMBERS), draw(FLOATS), files, metrics, folder)


@given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json(), "here") == manifest


@given(manifests(), st.data())
def test_a_manifest_is_never_read_as_another_one(manifest: Manifest, data: st.DataObject) -> None:
    """Any byte changed, lost or added."""
    written = manifest.to_json()
    position = data.draw(st.integers(0, len(written) - 1))
    middle = data.draw(st.binary(max_size=3))
    lost = data.draw(st.integers(0, 3))
    try:
        read = Manifest.from_json(written[:position] + middle + written[position + lost :], "here")
    except InvalidCheckpoint as error:
        assert str(error).startswith("here: manifest.json")
    else:
        assert read == manifest


# A name may have folders in it. What is outside: a part that leads there, or a name that a system reads in another way.
PARTS = st.one_of(st.sampled_from(["", ".", "..", "\\", "\0", "manifest.json"]), TEXT)
EVIL = (
    st.lists(PARTS, min_size=1, max_size=4)
    .map("/".join)
    .filter(lambda name: {"", ".", ".."} & {*name.split("/")} or {*name} & {*"\\\0"} or name == "manifest.json")
)


@given(manifests(), EVIL)
def test_no_manifest_names_a_file_outside(manifest: Manifest, name: str) -> None:
    evil = replace(manifest, files=(*manifest.files, FileEntry(name, 1, f"{PLAIN}:0")))
    with pytest.raises(InvalidCheckpoint, match="not allowed"):
        Manifest.from_json(evil.to_json(), "here")


@given(NUMBERS, st.frozensets(st.tuples(NUMBERS, NUMBERS), max_size=5), TEXT)
def test_a_fence_is_read_as_it_was_written(attempt: int, accepted: frozenset[tuple[int, int]], writer: str) -> None:
    fence = Fence(attempt, accepted, writer)
    assert Fence.from_json(fence.to_json()) == fence


# -- retention -------------------------------------------------------------------------------------------------------


@st.composite
def committed(draw: st.DrawFn) -> list[Manifest]:
    steps = draw(st.lists(st.integers(0, 100), unique=True, max_size=15))
    ratings = st.one_of(st.none(), st.sampled_from([0.5, 1.0, 2.0]), FLOATS)
    rated = [(step, draw(ratings)) for step in steps]
    return [
        Manifest("run", 1, step, 1, 0, 0.0, (), {} if loss is None else {"eval_loss": loss}) for step, loss in rated
    ]


RETENTIONS = st.builds(
    Retention,
    keep_last=st.one_of(st.none(), st.integers(0, 5)),
    keep_every=st.one_of(st.none(), st.integers(1, 20)),
    keep_best=st.integers(1, 3),
    best_metric=st.sampled_from([None, "eval_loss", "never_measured"]),
    greater_is_better=st.booleans(),
)


@given(committed(), RETENTIONS)
def test_what_retention_promises_to_keep_stays(saved: list[Manifest], retention: Retention) -> None:
    removed = steps_to_remove(saved, retention)
    steps = sorted(manifest.step for manifest in saved)
    assert removed == sorted({*removed}) and {*removed} <= {*steps}
    kept = [manifest for manifest in saved if manifest.step not in removed]
    if steps:
        assert steps[-1] not in removed
    if retention.keep_last is None:
        assert removed == []
        return
    newest = steps[-max(retention.keep_last, 1) :]
    assert not {*removed} & {*newest}
    assert retention.keep_every is None or all(step % retention.keep_every for step in removed)
    ratings = {manifest.step: manifest.metrics["eval_loss"] for manifest in saved if manifest.metrics}
    milestones = {step for step in steps if retention.keep_every and step % retention.keep_every == 0}
    if ratings and retention.best_metric == "eval_loss":
        for _ in range(min(retention.keep_best, len(ratings))):
            best = (max if retention.greater_is_better else min)(ratings.values())
            # The oldest of equals is the best, as in the Trainer.
            step = min(step for step, rating in ratings.items() if rating == best)
            assert step not in removed
            milestones.add(step)
            del ratings[step]
    # Nothing else is kept, so that a disk does not fill up.
    assert {manifest.step for manifest in kept} == {*newest} | milestones
    # Removing once is enough.
    assert steps_to_remove(kept, retention) == []


@given(st.lists(committed(), min_size=1, max_size=6), RETENTIONS)
def test_whatever_is_added_between_two_prunings_the_newest_and_the_best_are_there(
    batches: list[list[Manifest]], retention: Retention
) -> None:
    """Metrics never change: what was the best once is kept until a better one comes."""
    there: dict[int, Manifest] = {}
    seen: dict[int, Manifest] = {}
    for batch in batches:
        new = {manifest.step: manifest for manifest in batch if manifest.step > max(seen, default=-1)}
        there |= new
        seen |= new
        for step in steps_to_remove(there.values(), retention):
            del there[step]
        if seen:
            assert max(seen) in there
        rated = [manifest for manifest in seen.values() if manifest.metrics]
        if rated and retention.best_metric == "eval_loss":
            sign = -1 if retention.greater_is_better else 1
            assert min(rated, key=lambda m: (sign * m.metrics["eval_loss"], m.step)).step in there


@given(committed(), committed(), RETENTIONS)
def test_what_is_uploaded_is_there_the_newest_first_and_stays_where_it_comes(
    local: list[Manifest], durable: list[Manifest], retention: Retention
) -> None:
    due = steps_to_upload(local, durable, retention)
    here, there = {m.step: m for m in local}, {m.step: m for m in durable}
    assert due == sorted({*due}, reverse=True) and {*due} <= here.keys() - there.keys()
    if here and max(here) > max(there, default=-1):
        assert due[0] == max(here)
    after = there | {step: here[step] for step in due}
    # Neither anything left to do, nor anything that the next pruning would take away at once, the newest apart.
    assert steps_to_upload(local, after.values(), retention) == []


# -- policy ----------------------------------------------------------------------------------------------------------

RESTARTED = [
    FailureKind.CRASHED,
    FailureKind.HUNG,
    FailureKind.AGENT_LOST,
    FailureKind.LAUNCHER_LOST,
    FailureKind.NODE_LOST,
    FailureKind.RUNNER_LOST,
]
FAILURES = st.builds(
    Failure,
    kind=st.sampled_from([*RESTARTED, FailureKind.OUT_OF_MEMORY]),
    cause=st.just("cause"),
    step=st.integers(0, 3),
    signature=st.sampled_from(["", "a", "b"]),
)


@dataclass
class Life:
    """A run as the supervisor sees it: one restart state, one decision after each failure."""

    max_restarts: int
    record: RestartState = field(default_factory=RestartState)
    committed: int = -1

    def fail(self, failure: Failure, progress: int) -> Restart | Stop:
        self.committed += progress
        self.record.add(AttemptRecord(failure, self.committed))
        # A new pod reads the restart state from storage.
        self.record = RestartState.from_json(self.record.to_json(1))
        decision = decide(
            self.record.history, max_restarts=self.max_restarts, stop_requested=False, batch=self.record.batch
        )
        if isinstance(decision, Restart):
            self.record.batch = decision.batch
        return decision


@given(st.integers(0, 5), st.lists(st.tuples(FAILURES, st.integers(0, 1)), min_size=40, max_size=60))
def test_without_progress_restarts_are_bounded(max_restarts: int, events: list[tuple[Failure, int]]) -> None:
    """By the budget, and by what can be halved; with progress the budget is whole again."""
    life, restarts, in_a_row = Life(max_restarts), 0, 0
    for failure, progress in events:
        was_progress = bool(progress and life.record.history)
        decision = life.fail(failure, progress)
        if was_progress:
            restarts = in_a_row = 0
        in_a_row += failure.kind is not FailureKind.OUT_OF_MEMORY
        if isinstance(decision, Stop):
            assert decision.exit_code in (ExitCode.DETERMINISTIC, ExitCode.BUDGET_SPENT, ExitCode.NO_PROGRESS)
            assert (decision.exit_code is ExitCode.NO_PROGRESS) <= (life.committed < 0)
            return
        restarts += 1
        assert decision.failures_in_a_row == in_a_row <= max_restarts + (failure.kind is FailureKind.OUT_OF_MEMORY)
        # Six halvings of what does not say its batch.
        assert restarts <= max_restarts + 6


@given(st.integers(1, 5), st.lists(st.sampled_from(RESTARTED), min_size=1, max_size=30))
def test_with_progress_between_failures_there_is_no_end(max_restarts: int, kinds: list[FailureKind]) -> None:
    life = Life(max_restarts)
    for number, kind in enumerate(kinds):
        decision = life.fail(Failure(kind, "cause", step=number, signature=f"a|{number}"), 1)
        assert isinstance(decision, Restart) and decision.failures_in_a_row == 1


@given(st.integers(1, 5), FAILURES, st.integers(0, 1))
def test_the_same_failure_at_the_same_step_twice_is_the_last(
    max_restarts: int, failure: Failure, progress: int
) -> None:
    life = Life(max_restarts)
    first, second = life.fail(failure, 1), life.fail(failure, 0)
    assert isinstance(first, Restart)
    if failure.kind is not FailureKind.OUT_OF_MEMORY and failure.signature:
        assert isinstance(second, Stop) and second.exit_code is ExitCode.DETERMINISTIC
    elif failure.kind is FailureKind.OUT_OF_MEMORY or max_restarts > 1:
        assert isinstance(second, Restart)


HISTORIES = st.lists(st.builds(AttemptRecord, FAILURES, st.integers(-1, 3)), max_size=10)


@given(HISTORIES, FAILURES, st.integers(0, 3), st.sampled_from([FailureKind.PREEMPTED, FailureKind.ENDED]))
def test_being_stopped_costs_nothing_whatever_was_before(
    history: list[AttemptRecord], failure: Failure, max_restarts: int, kind: FailureKind
) -> None:
    last = AttemptRecord(replace(failure, kind=kind), 3)
    for records, requested in (([*history, last], False), ([*history, AttemptRecord(failure, 3)], True)):
        decision = decide(records, max_restarts=max_restarts, stop_requested=requested)
        assert isinstance(decision, Stop) and decision.exit_code is ExitCode.PREEMPTED


@given(HISTORIES, st.sampled_from(FailureKind), st.booleans(), st.integers(0, 3))
def test_there_is_always_a_decision_with_a_reason(
    history: list[AttemptRecord], kind: FailureKind, requested: bool, max_restarts: int
) -> None:
    records = [*history, AttemptRecord(Failure(kind, "cause"), 0)]
    decision = decide(records, max_restarts=max_restarts, stop_requested=requested)
    assert decision.reason and decision == decide(records, max_restarts=max_restarts, stop_requested=requested)
    if isinstance(decision, Stop):
        assert (decision.exit_code is ExitCode.DONE) == (kind is FailureKind.FINISHED)


@given(st.one_of(st.none(), st.integers(1, 2**16)), st.integers(1, 64))
def test_halving_keeps_the_global_batch_and_ends(micro_batch: int | None, accumulation: int) -> None:
    shape = BatchDivision(micro_batch, accumulation if micro_batch is not None else 1)
    out_of_memory = AttemptRecord(Failure(FailureKind.OUT_OF_MEMORY, "cause"), 0)
    for _ in range(20):
        decision = decide([out_of_memory], max_restarts=0, stop_requested=False, batch=shape)
        if isinstance(decision, Stop):
            assert decision.exit_code is ExitCode.DETERMINISTIC
            return
        smaller = decision.batch
        assert smaller.divisor == 2 * shape.divisor
        if shape.micro_batch is not None:
            assert smaller.micro_batch is not None
            assert smaller.micro_batch * smaller.accumulation == shape.micro_batch * shape.accumulation
        shape = smaller
    raise AssertionError(f"still halving: {shape}")


@given(st.lists(FAILURES, max_size=30), st.integers(1, 64))
def test_batches_are_never_made_larger_again(failures: list[Failure], micro_batch: int) -> None:
    life = Life(100, RestartState(batch=BatchDivision(micro_batch)))
    for number, failure in enumerate(failures):
        before = life.record.batch
        life.fail(replace(failure, step=number, signature=""), number % 2)
        grown = failure.kind is FailureKind.OUT_OF_MEMORY and micro_batch % (2 * before.divisor) == 0
        assert life.record.batch.divisor == before.divisor * (2 if grown else 1)
