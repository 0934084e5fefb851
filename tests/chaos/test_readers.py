"""Damaged files of a checkpoint: a reader returns the right content, or refuses the file with a clear error.

It never raises another exception, hangs, allocates huge amounts of memory or runs code from a file. Files are damaged
blindly, as a disk would, and knowingly, with all digests corrected, so that the damage reaches the parser behind them.

FUZZ_CASES=20000 tries more cases than the few per reader that are the default. The seed is fixed by default;
FUZZ_SEED=random draws one, FUZZ_SEED=N repeats such a run, FUZZ_CASE=N repeats one case.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import pickletools
import random
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from chaos import mutations
from chaos.fuzzing import Reader, assert_clear, fuzz, refused
from chaos.stores import MemoryObjects
from contract.support import commit
from helpers import spread_checkpoint
from helpers.journals import event
from helpers.proposals import proposed
from helpers.small_checkpoint import STEP, point
from prometheus_client import generate_latest
from rich.console import Console

from checkpointing import CheckpointManager
from checkpointing.agent.events import CheckpointQuarantined, Event
from checkpointing.commit.shard_reading import ShardReaders
from checkpointing.commit.tiers import Tiers
from checkpointing.data.dealing import StepLayout
from checkpointing.data.stream import StreamPosition
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.spread_files import open_spread
from checkpointing.format.digest import digest_buffer
from checkpointing.format.layout import ADAPTER_NAME
from checkpointing.format.manifest import Manifest, _self_digest
from checkpointing.format.shard_index import INDEX_NAME
from checkpointing.host import locking
from checkpointing.process import rng
from checkpointing.process.ranks import Ranks
from checkpointing.resume.restorer import restore_generators
from checkpointing.resume.verified_read import BufferCache, DigestShares, read_verified
from checkpointing.state.adapter import BASE_NAME, Adapter
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.fence import Fence
from checkpointing.storage.object_storage import ObjectStorage
from runner.errors import UsageError
from runner.journal.journal import Journal, read_journal
from runner.journal.run_directory import RunDirectory
from runner.journal.summary import render, summarise
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, BatchDivision, Restart, Stop, decide
from runner.recovery.restart_state import RestartState
from runner.system.text import duration
from runner.ui.prometheus import RunCollector
from runner.ui.status import panel

NUM_CASES = int(os.environ.get("FUZZ_CASES", "200"))
# The seed is drawn only on request: an unrelated change must not fail because of new random cases.
_SEED_ASKED = os.environ.get("FUZZ_SEED", "1")
SEED = random.SystemRandom().randrange(10**9) if _SEED_ASKED == "random" else int(_SEED_ASKED)
ONLY = int(os.environ["FUZZ_CASE"]) if "FUZZ_CASE" in os.environ else None


@dataclass(frozen=True)
class Place:
    """A real checkpoint of a tiny model in `root`, and room to work in."""

    root: Path
    scratch: Path

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.root)

    @property
    def folder(self) -> Path:
        return self.root / f"checkpoint-{STEP}"

    def data(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def small_copy(self) -> LocalStorage:
        """Return a new storage with the small checkpoints of steps 10 and 20."""
        storage = LocalStorage(Path(tempfile.mkdtemp(dir=self.scratch)))
        for step in (10, STEP):
            commit(storage, step, nbytes=4096)
        return storage


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Everything is written by the manager, as in a user's own loop; what the Trainer adds, by our Trainer's code."""
    from transformers import TrainerState

    from checkpointing.transformers.loop_state import JobRecord, LoopFigures, LoopState, state_file

    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    manager = CheckpointManager(
        str(root), model=model, optimizer=optimizer, scheduler=scheduler, states={"average": model}, snapshot_steps=None
    )
    manager.resume()
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    history = [{"loss": 2.5, "step": 10, "epoch": 0.5}, {"eval_loss": 2.0, "step": STEP, "epoch": 1.0}]
    state = TrainerState(epoch=1.0, global_step=STEP, max_steps=40, log_history=history, train_batch_size=4)
    loop = SimpleNamespace(
        _tr_loss=torch.tensor(0.25),
        _total_loss_scalar=1.5,
        _globalstep_last_logged=10,
        _metrics={"train": {"entropy": [0.5, 0.25]}},
        _total_train_tokens=1000,
        current_flos=7.5e9,
    )
    record = JobRecord(
        layout=StepLayout(1, 4, 1), stream=StreamPosition(1, 2, 3, {"epoch": 1, "shards": [0, 5]}, 50, 7)
    )
    loop_state = LoopState.capture(loop, LoopFigures(), record=record, recent_losses=[2.5, 2.25])
    own = {"loop_state_0.json": loop_state.to_bytes()}
    shared = {"trainer_state.json": state_file(state)()}
    manager.save(STEP, 80, own, shared, metrics={"eval_loss": 2.0}, wait=True)
    manager.close()
    return Place(root, tmp_path_factory.mktemp("scratch"))


# -- what says that a checkpoint is one ------------------------------------------------------------------------------


def manifest_altered(place: Place) -> Reader:
    original = Manifest.from_json(place.data("manifest.json"), "here")

    def read(data: bytes) -> bool:
        with refused("manifest.json", InvalidCheckpoint) as was:
            assert Manifest.from_json(data, "here") == original
        return not was()

    return Reader(place.data("manifest.json"), [mutations.blindly, mutations.json_knowingly], read)


def sealed(data: bytes, r: random.Random) -> bytes:
    """A manifest with odd things in it and a digest of itself that is right."""
    data = mutations.json_knowingly(data, r)
    try:
        document = json.loads(data)
        document.pop("manifest_digest", None)
        digest = _self_digest(document)
        tree = [(key, value) for key, value in mutations.parse(data) if key != "manifest_digest"]
        return mutations.to_text(mutations.Pairs([*tree, ("manifest_digest", digest)])).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return data


def assert_usable(manifest: Manifest) -> None:
    """Check that no use of a manifest fails because of its content."""
    assert Manifest.from_json(manifest.to_json(), "here") == manifest
    numbers = [manifest.attempt, manifest.step, manifest.world_size, manifest.samples_consumed]
    assert all(type(number) is int and 0 <= number < 2**63 for number in [*numbers, *(f.size for f in manifest.files)])
    assert all(math.isfinite(number) for number in [manifest.created_at, *manifest.metrics.values()])
    names = [file.name for file in manifest.files]
    assert len({*names}) == len(names)
    assert all(Path("/a", name).parent == Path("/a") and name not in ("", "..") for name in names)
    assert Path("/a", manifest.folder).resolve().is_relative_to("/a")
    "".join([*names, manifest.run_id, manifest.folder, *manifest.metrics]).encode()
    assert duration(time.time() - manifest.created_at) and f"{manifest.total_bytes / 1e6:.1f} MB"


def manifest_forged(place: Place) -> Reader:
    def read(data: bytes) -> bool:
        with refused("manifest.json", InvalidCheckpoint) as was:
            assert_usable(Manifest.from_json(data, "here"))
        return not was()

    return Reader(place.data("manifest.json"), [sealed], read)


def assert_goes_on(storage: Storage, aside: Callable[[str], None]) -> bool:
    """Check that the run resumes from step 20, whatever its state, or from step 10; return True if from step 20."""
    tiers, announced = Tiers(storage), list[Event]()
    for entry in tiers.catalog.entries():
        assert (entry.manifest is None) == bool(entry.problem)
        assert_clear(f"{entry.problem}", "")
    proposal = proposed(tiers, announced.append)
    for report in announced:
        assert isinstance(report, CheckpointQuarantined)
        json.dumps(report.to_dict())
        aside(report.kept_as)
    assert proposal.error is None and proposal.step in (10, STEP), proposal
    assert tiers.catalog.newest_attempt() >= 1
    with refused(f"checkpoint-{STEP}", InvalidCheckpoint) as was:
        tiers.catalog.find(STEP)
    return not was()


def catalog(place: Place) -> Reader:
    """The manifest in its place, with two steps to choose from."""
    storage = place.small_copy()
    path = storage.directory(STEP) / "manifest.json"
    good = path.read_bytes()

    def read(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            return assert_goes_on(storage, lambda kept: None)
        finally:
            kept = storage.root / f"checkpoint-{STEP}.invalid"
            if kept.exists():
                kept.rename(path.parent)

    return Reader(good, [mutations.blindly, sealed], read)


def remote_catalog(place: Place) -> Reader:
    """As above, in object storage, where the manifest also says where its files are stored."""
    store = MemoryObjects()
    storage = ObjectStorage(store)
    for step in (10, STEP):
        commit(storage, step, nbytes=4096)
    objects = dict(store.objects)

    def read(data: bytes) -> bool:
        store.objects = {**objects, f"checkpoint-{STEP}/manifest.json": data}
        whole = assert_goes_on(storage, lambda kept: None)
        storage.sweep()
        assert {key for key in objects if key.startswith("checkpoint-10/")} <= store.objects.keys()
        storage.remove(STEP)
        assert {key for key in objects if key.startswith("checkpoint-10/")} <= store.objects.keys()
        return whole

    return Reader(objects[f"checkpoint-{STEP}/manifest.json"], [mutations.blindly, sealed], read)


def odd_name(data: bytes, r: random.Random) -> bytes:
    """A foreign name next to the checkpoints that looks like one of theirs."""
    number = r.choice(["0", "5", "007", "020", "0020", "٣", "²", "-1", "+5", "1e3", " 5", "5 ", "5\n", "20\n"])
    number = r.choice([number, number, "9" * r.choice([19, 20, 100, 230]), str(r.randrange(100)), ""])
    shape = r.choice(["checkpoint-{}", "checkpoint-{}", "checkpoint-{}/", "checkpoint-{}.invalid", "checkpoint-{}.tmp",
                      ".checkpoint-{}.1.tmp", ".checkpoint-{}.removing/", ".fence.json.{}.tmp", "fence/{}.json",
                      "checkpoint-{}/manifest.json", "checkpoint-{}/manifest.json/", "checkpoint-{}/1.ab/model",
                      "checkpoint-{}/manifest.invalid.ab.json"])  # fmt: skip
    return shape.format(number).encode()


def names(place: Place) -> Reader:
    """A foreign file or folder next to the checkpoints."""
    storage = place.small_copy()
    ours = {path.name for path in storage.root.iterdir()}

    def read(data: bytes) -> bool:
        name = data.decode()
        path = storage.root / name
        if path.exists():
            return True
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"foreign")
        try:
            assert assert_goes_on(storage, lambda kept: None)
            storage.sweep()
            assert storage.fence() == Fence()
        finally:
            for other in storage.root.iterdir():
                if other.name not in ours:
                    shutil.rmtree(other) if other.is_dir() else other.unlink()
        return True

    return Reader(b"", [odd_name], read)


def remote_names(place: Place) -> Reader:
    """A foreign object among those of the checkpoints."""
    store = MemoryObjects()
    storage = ObjectStorage(store)
    for step in (10, STEP):
        commit(storage, step, nbytes=4096)
    objects = dict(store.objects)

    def read(data: bytes) -> bool:
        if (name := data.decode()) in objects:
            return True
        store.objects = {**objects, name: b"foreign"}
        with refused(name, OSError) as was:
            assert assert_goes_on(storage, lambda kept: None)
            storage.sweep()
        assert objects.keys() <= store.objects.keys()
        # An unreadable fence needs a user's attention; nothing else may stop a run.
        assert not was() or name.startswith("fence/")
        return not was()

    return Reader(b"", [odd_name], read)


def fence(place: Place) -> Reader:
    storage = place.small_copy()
    storage.begin_attempt(3, [(30, 2)])
    path = storage.root / ".fence.json"

    def read(data: bytes) -> bool:
        path.write_bytes(data)
        with refused(".fence.json", OSError) as was:
            found = storage.fence()
            assert Fence.from_json(found.to_json()) == found
            assert type(found.attempt) is int and 0 <= found.attempt < 2**63
            found.admits_step(10, 1)
            storage.counting()
        return not was()

    return Reader(path.read_bytes(), [mutations.blindly, mutations.json_knowingly], read)


def any_file(place: Place) -> Reader:
    """Each file in turn, with a digest that no longer matches: a read returns what was written, or nothing."""
    storage = place.storage
    manifest = storage.read_manifest(STEP)
    originals = {file.name: place.data(file.name) for file in manifest.files}
    remaining = iter(range(10**9))

    def read(data: bytes) -> bool:
        number = next(remaining)
        name, original = sorted(originals.items())[number % len(originals)]
        # As long as the original, so that its size does not give it away.
        damaged = data if number % 3 == 0 else (data + original)[: len(original)]
        path = storage.directory(STEP) / name
        path.write_bytes(damaged)
        try:
            found, problem = read_verified(
                storage, STEP, 0, 1, private=number % 2 == 0, buffers=BufferCache(""), shares=DigestShares()
            )
        finally:
            path.write_bytes(original)
        if found is None:
            assert isinstance(problem, InvalidCheckpoint)
            assert_clear(str(problem), name)
            return False
        assert {key: bytes(value) for key, value in found.files.items()} == originals
        return True

    return Reader(place.data("model.safetensors"), [mutations.blindly, lambda data, r: data], read)


# -- what is in it, its digest being right ---------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Equal, with tensors and arrays inside, and NaN."""
    one, other = (value.array if isinstance(value, rng.Words) else value for value in (one, other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        equal = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        if not equal or one.layout != torch.strided or one.is_meta:
            return equal
        return one.contiguous().reshape(-1).view(torch.uint8).equal(other.contiguous().reshape(-1).view(torch.uint8))
    if isinstance(one, torch.storage.TypedStorage):
        # A pickle may hold a bare one, which has no comparison of its own.
        return isinstance(other, torch.storage.TypedStorage) and one.dtype == other.dtype and [*one] == [*other]
    if isinstance(one, dict):
        # A pickle may hold a tensor as a key, which is found by no equal one.
        return isinstance(other, dict) and same([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one) is not False


def model(place: Place) -> Reader:
    """The `safetensors` package decides what a valid file is."""
    name = "model.safetensors"
    tied = {"2.weight": "0.weight"}

    def read(data: bytes) -> bool:
        with refused(name, CheckpointError) as was:
            state = point(name, data).model_state()
            expected = safetensors.torch.load(data)
            assert state.keys() >= expected.keys()
            assert all(same(state[key], value) for key, value in expected.items())
            assert all(state[key] is state[tied.get(key, key)] or key not in expected for key in state)
        return not was()

    return Reader(place.data(name), [mutations.blindly, mutations.safetensors_knowingly], read)


def odd_object(r: random.Random) -> Any:
    return r.choice(
        [
            None,
            True,
            -1,
            0,
            2**70,
            0.5,
            math.nan,
            "x",
            "../x",
            b"x",
            [],
            {},
            (),
            [1, 2],
            torch.zeros(3),
            torch.zeros(0),
            torch.zeros(2500, dtype=torch.uint8),
            torch.zeros(5056, dtype=torch.uint8),
            torch.full((5056,), 255, dtype=torch.uint8),
            torch.zeros(2, 3).t(),
            torch.zeros(1).expand(5),
            torch.zeros(3, dtype=torch.complex64),
            torch.eye(3).to_sparse(),
            torch.nn.Parameter(torch.zeros(2)),
            torch.Size([1]),
            torch.float32,
            np.zeros(624, dtype=np.uint32),
            np.zeros(3),
            np.zeros(624, dtype=np.int64),
            624,
            625,
            10**6,
            -(2**31),
            "MT19937",
            tuple(range(625)),
            (2**32,) * 625,
        ]
    )


def with_arrays(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: with_arrays(value) for key, value in obj.items()}
    if type(obj) in (list, tuple):
        return type(obj)(map(with_arrays, obj))
    return obj.array if isinstance(obj, rng.Words) else obj


def resaved(data: bytes, r: random.Random) -> bytes:
    """What `torch.save` makes of the same object with something odd in it."""
    with torch.serialization.safe_globals(rng.SAFE_GLOBALS):
        obj = with_arrays(torch.load(io.BytesIO(data), weights_only=True))
    target = io.BytesIO()
    torch.save(mutations.mutate_object(obj, r, odd_object), target)
    return target.getvalue()


TORCH_MUTATIONS = [mutations.blindly, mutations.torch_file_knowingly, mutations.torch_file_knowingly, resaved]


def in_order(data: bytes) -> bool:
    """Whether the pickle asks for the storages in the order of their numbers, as `torch.save` lets it.

    The reader of large files relies on that: it fills them in without knowing which number was asked for.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        pickled = mutations.record(archive, info)
    try:
        texts = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
    except Exception:
        return False
    numbers = list(dict.fromkeys(text for text in texts if text.isdigit()))
    return numbers == [str(number) for number in range(len(numbers))]


def torch_file(name: str, place: Place) -> Reader:
    """torch's own loader decides what a valid file is."""

    def judged(data: bytes) -> Any:
        with torch.serialization.safe_globals(rng.SAFE_GLOBALS):
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")

    def read(data: bytes) -> bool:
        with refused(name, CheckpointError) as was:
            found = point(name, data).torch_object(name)
        if was():
            return False
        try:
            expected = judged(data)
        except Exception:
            # It also looks at what we have no use for. Where that is damaged, the rest is right.
            expected = original
        assert same(found, expected) or not in_order(data)
        return True

    original = judged(place.data(name))
    return Reader(place.data(name), TORCH_MUTATIONS, read)


def generators(place: Place) -> Reader:
    """Every generator works afterwards, and where the file was refused, as if nothing had been read."""

    def draw() -> list[Any]:
        numbers = [random.random() for _ in range(700)] + [random.gauss(), random.gauss()]
        return [numbers, np.random.rand(700).tolist(), np.random.randn(3).tolist(), torch.randn(700).tolist()]

    def read(data: bytes) -> bool:
        before = rng.state(1)
        with refused("rng_state.pth", CheckpointError) as was:
            restore_generators(point("rng_state.pth", data), 0, 1)
        drawn = draw()
        if was():
            rng.set_state(before)
            assert draw() == drawn
        return not was()

    return Reader(place.data("rng_state.pth"), TORCH_MUTATIONS, read)


def trainer_state(place: Place) -> Reader:
    from transformers import TrainerState

    from checkpointing.transformers.loop_state import checked_directory

    def read(data: bytes) -> bool:
        found = point("trainer_state.json", data)
        try:
            with refused("trainer_state.json", CheckpointError) as was:
                directory = checked_directory(found)
            if was():
                return False
            state = TrainerState.load_from_json(str(Path(directory, "trainer_state.json")))
            assert state.global_step == STEP
            assert all(isinstance(entry, dict) for entry in state.log_history)
            assert isinstance(state.stateful_callbacks, dict)
            return True
        finally:
            found.close()

    return Reader(place.data("trainer_state.json"), [mutations.blindly, mutations.json_knowingly], read)


def loop_state(place: Place) -> Reader:
    from checkpointing.transformers.guards import StepGuard
    from checkpointing.transformers.loop_state import JobRecord, LoopState

    def read(data: bytes) -> bool:
        trainer = SimpleNamespace(current_flos=0, _tr_loss=torch.tensor(0.0), _metrics={"train": {}})
        with refused("loop_state_0.json", CheckpointError) as was:
            restored = point("loop_state_0.json", data)
            record, state = JobRecord.read(restored), LoopState.read(restored, 0, 2)
            assert record is not None and state is not None
            assert record.layout is None or record.layout.samples_per_step > 0
            guard = StepGuard(spike_zscore=8.0)
            state.restore(trainer)
            guard.restore_losses(state.recent_losses or ())
            assert isinstance(trainer._tr_loss.item(), float)
            assert isinstance(trainer._globalstep_last_logged + 1, (int, float))
            assert all(isinstance(sum(values, 0.0), float) for values in trainer._metrics["train"].values())
            assert isinstance(getattr(trainer, "_total_train_tokens", 0) + 1, (int, float))
            assert isinstance(state.figures.mean_loss(0.0, STEP), float)
            assert guard.spikes is not None
            guard.spikes.look(2.0)
        return not was()

    return Reader(place.data("loop_state_0.json"), [mutations.blindly, mutations.json_knowingly], read)


def base_model(place: Place) -> Reader:
    """An adapter is restored on its own base model, or not at all."""
    layer = torch.nn.Linear(4, 4)
    adapter = Adapter(lambda state: {"bias": state["bias"]}, "org/base")
    right = adapter.identify(layer)
    weights = safetensors.torch.save({"bias": torch.ones(4)})

    def read(data: bytes) -> bool:
        found = point(ADAPTER_NAME, weights)
        found.files[BASE_NAME] = memoryview(bytearray(data))
        with refused(BASE_NAME, CheckpointError) as was:
            adapter.restore(layer, found)
            assert json.loads(data)["digest"] == json.loads(right)["digest"]
        return not was()

    return Reader(right, [mutations.blindly, mutations.json_knowingly], read)


# -- files next to the checkpoints -------------------------------------------------------------------------------------


def note(place: Place) -> Reader:
    """A restart state that cannot be parsed counts as empty; the next one replaces it."""
    storage = LocalStorage(place.scratch / "note")
    storage.probe()
    crash = Failure(FailureKind.CRASHED, "cause", 0, 12, "print")
    record = RestartState([AttemptRecord(crash, 10), AttemptRecord(crash, 10)], BatchDivision(4, 2, 2), running=5)
    record.skipped, record.lineage = [(3, 9), (12, 12)], "4f1c"
    record.account_for_steps(0, 12)
    next_note = record.to_json(2**62).encode()

    def read(data: bytes) -> bool:
        storage.sidecars.write_restart_state(data)
        found = RestartState.from_json(storage.sidecars.read_restart_state())
        accepted = found != RestartState()
        assert RestartState.from_json(found.to_json(7)) == found
        found.account_for_lost_runner(10)
        for kind in (FailureKind.CRASHED, FailureKind.OUT_OF_MEMORY):
            history = [*found.history, AttemptRecord(replace(crash, kind=kind), 10)]
            decision = decide(history, max_restarts=3, stop_requested=False, batch=found.batch, skips_left=1)
            assert isinstance(decision, (Restart, Stop)) and decision.reason
            if isinstance(decision, Restart):
                assert 1 <= found.batch.divisor <= decision.batch.divisor <= 2**18
        storage.sidecars.replace_restart_state(next_note)
        assert storage.sidecars.read_restart_state() in (data, next_note)
        return accepted

    data = record.to_json(6).encode()
    return Reader(data, [mutations.blindly, mutations.json_knowingly, mutations.json_knowingly], read)


def lock(place: Place) -> Reader:
    path = place.scratch / ".runner.lock"
    fd = locking.open_lock(path)
    assert locking.try_lock(fd)

    def read(data: bytes) -> bool:
        path.write_bytes(data)
        holder = locking.holder(fd)
        holder.encode()
        assert holder
        return locking.is_elsewhere(holder)

    return Reader(path.read_bytes(), [mutations.blindly], read)


def journal(place: Place) -> Reader:
    """Lines that cannot be parsed are left out."""
    path = place.scratch / "journal.jsonl"
    now = iter(range(1000, 2000))
    book = Journal(path, lambda: float(next(now)))
    book.append(event("run_started", run_id="abc", pid=1, committed_step=-1), 0)
    for attempt in (1, 2):
        book.append(event("attempt_started"), attempt)
        book.append(event("training_started", step=10 * attempt, total_steps=40), attempt)
        book.append(event("log", step=10 * attempt + 5, loss=2.5, tokens_per_s=100.0), attempt)
        book.append(event("committed", step=10 * attempt + 10, tier="local", nbytes=100, duration_s=0.5), attempt)
        book.append(event("commit_failed", step=10, error="no space"), attempt)
        book.append(event("checkpoint_set_aside", step=5, reason="altered", kept_as="/x"), attempt)
        times = {"training_began": 1003.0, "last_step_at": 1010.0}
        ended = event("attempt_ended", kind="crashed", cause="a cause", step=20, start_step=0, **times)
        book.append(ended, attempt)
    book.append(event("run_ended", state="failed", reason="a reason", exit_code=78), 2)
    book.close()

    def knowingly(data: bytes, r: random.Random) -> bytes:
        """Lines and fields are lost, lines change their places, and some say something else altogether."""
        lines = data.splitlines()
        for _ in range(r.choice([1, 1, 3])):
            index = r.randrange(len(lines))
            match r.randrange(4):
                case 0:
                    lines[index] = lines[r.randrange(len(lines))]
                case 1:
                    lines[index] = mutations.to_text(mutations.odd_value(r)).encode()
                case 2:
                    event = r.choice(["run_started", "attempt_started", "committed", "log", "attempt_ended", "x"])
                    lines[index] = mutations.to_text(
                        mutations.Pairs([("event", event), ("time", mutations.odd_value(r)), ("attempt", 1)])
                    ).encode()
                case _:
                    with contextlib.suppress(ValueError, RecursionError, TypeError):
                        pairs = mutations.parse(lines[index])
                        del pairs[r.randrange(len(pairs))]
                        lines[index] = mutations.to_text(pairs).encode()
        return b"\n".join(lines)

    def read(data: bytes) -> bool:
        path.write_bytes(data)
        summary = summarise(read_journal(path), now=3000.0)
        assert render(summary, {}) and json.dumps(summary.to_dict())
        Console(file=io.StringIO()).print(panel(summary, 3000.0, {}))
        assert generate_latest(RunCollector(path, lambda: 3000.0))
        return bool(summary.attempts)

    return Reader(path.read_bytes(), [mutations.blindly, knowingly, knowingly], read)


def run_id(place: Place) -> Reader:
    directory = RunDirectory(str(place.scratch / "run"))
    directory.create()
    directory.run_id()
    path = directory.root / "run.json"

    def read(data: bytes) -> bool:
        path.write_bytes(data)
        with refused("run.json", UsageError) as was:
            found = directory.run_id()
            found.encode()
            assert 0 < len(found) < 1000
        return not was()

    return Reader(path.read_bytes(), [mutations.blindly, mutations.json_knowingly], read)


def spread_model(files: dict[str, Any], index: bytes) -> dict[str, torch.Tensor]:
    """Read a model that is spread over shards, as a single rank does."""
    held = {name: (memoryview(data), digest_buffer(memoryview(data))) for name, data in files.items()}
    spread = open_spread("checkpoint-20", held, memoryview(index), 2, 0, 1)
    state = LoadedCheckpoint(
        "checkpoint-20", step=STEP, world_size=2, samples_consumed=80, files={}, path=None, private=True, spread=spread
    )
    try:
        found = state.model_state()
        spread.fill(spread_checkpoint.NAME, found)
        return found
    finally:
        state.close()


def shard_index(place: Place) -> Reader:
    files: dict[str, Any] = spread_checkpoint.files_of(spread_checkpoint.COLUMNS)
    index = files.pop(INDEX_NAME)

    def read(data: bytes) -> bool:
        # Its own digest is right: other bytes of the same shards may be what it names.
        with refused("checkpoint-20", CheckpointError) as was:
            spread_model(files, data)
        return not was()

    return Reader(index, [mutations.blindly, mutations.json_knowingly], read)


def shard_parts(place: Place) -> Reader:
    """The digests of a shard's parts, of which nothing but the manifest's digest vouches for the content."""
    files: dict[str, Any] = spread_checkpoint.files_of(spread_checkpoint.ROWS)
    recorded = {name: (memoryview(data), digest_buffer(memoryview(data))) for name, data in files.items()}
    name = "shards/1.parts.json"

    def read(data: bytes) -> bool:
        readers = ShardReaders({**recorded, name: (memoryview(data), "")})
        with refused("", ValueError) as was:
            assert b"".join(readers(1).read(0, 48)) == bytes(files["shards/1.bin"][:48])
        return not was()

    return Reader(bytes(files[name]), [mutations.blindly, mutations.json_knowingly], read)


def step_record(place: Place) -> Reader:
    from checkpointing.format.step_record import RING_BYTES, StepRecord, StepRing, parse_records

    ring = StepRing(memoryview(bytearray(RING_BYTES)), 7)
    for step in range(1, 9):
        ring.put(StepRecord(step, {"batch": step, "loss": step << 40}, tokens=step))
    original = ring.records()

    def read(data: bytes) -> bool:
        found = parse_records(data, 7)
        assert all(original[step] == record for step, record in found.items())
        return bool(found)

    return Reader(ring.to_bytes(), [mutations.blindly], read)


def script_state(place: Place) -> Reader:
    from checkpointing.data.generators import generator_state
    from checkpointing.files.torch_files import torch_bytes
    from checkpointing.manager.script_state import ScriptState

    rngs: dict[str, Any] = {"first": np.random.default_rng(1), "second": torch.Generator(), "third": random.Random(1)}
    names = ("model", "optimizer", "torch_optimizer", "scheduler", "scaler", "held_as")
    nothing: Any = SimpleNamespace(state=SimpleNamespace(**dict.fromkeys(names), states={}), has_training=False)
    script = ScriptState(Ranks(), nothing, list)
    script.roots = lambda: rngs

    def read(data: bytes) -> bool:
        with refused("script_state_0.pt", CheckpointError) as was:
            script.restore(point("script_state_0.pt", data))
            rngs["first"].normal(), torch.rand((), generator=rngs["second"]), rngs["third"].random()
        return not was()

    states = {name: generator_state(one) for name, one in rngs.items()}
    return Reader(torch_bytes({"generators": states}), [mutations.blindly], read)


READERS: dict[str, Callable[[Place], Reader]] = {
    "manifest altered": manifest_altered,
    "manifest forged": manifest_forged,
    "catalog": catalog,
    "catalog in object storage": remote_catalog,
    "foreign names": names,
    "foreign names in object storage": remote_names,
    "fence": fence,
    "every file by its digest": any_file,
    "model.safetensors": model,
    "optimizer.pt": functools.partial(torch_file, "optimizer.pt"),
    "scheduler.pt": functools.partial(torch_file, "scheduler.pt"),
    "average.pt": functools.partial(torch_file, "average.pt"),
    "rng_state.pth": generators,
    "trainer_state.json": trainer_state,
    "loop_state_0.json": loop_state,
    "step_record_0.bin": step_record,
    "script_state_0.pt": script_state,
    "base_model.json": base_model,
    "index of shards": shard_index,
    "parts of a shard": shard_parts,
    "note": note,
    "lock": lock,
    "journal": journal,
    "run.json": run_id,
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_answers_rightly_or_refuses_clearly(name: str, place: Place, record_property: Any) -> None:
    reader = READERS[name](place)
    figures = fuzz(name, reader, NUM_CASES, SEED, ONLY)
    print(f"\n{name}: {NUM_CASES} cases, {figures['accepted']} accepted, {figures['refused']} refused, seed {SEED}")


def test_every_file_of_a_checkpoint_has_its_reader(place: Place) -> None:
    """A new file in a checkpoint needs an entry in `READERS`."""
    files = {path.name for path in place.folder.iterdir()}
    assert files - {"manifest.json"} <= READERS.keys(), files
