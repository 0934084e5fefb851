"""The overrides of what a trainer writes into a checkpoint, and reads from it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.small_checkpoint import point
from transformers import Trainer, TrainerControl, TrainerState

from checkpointing.data.dealing import StepLayout
from checkpointing.errors import Preempted
from checkpointing.transformers.saving import SavingMixin, added_files, overrides_saving
from checkpointing.transformers.train_call import ResilientOptions, Start, TrainCall

# What a stock Trainer does in addition when it saves.
LARGE = ("_save_scaler", "_save_rng_state", "_save_optimizer_and_scheduler", "_push_from_checkpoint")


class Stock:
    """In place of transformers' Trainer: records what it would have done itself."""

    args: Any
    state: Any

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.calls.append("_save_checkpoint")
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        (folder / "model.safetensors").write_bytes(b"1")
        for name in LARGE:
            getattr(self, name)(str(folder))

    def _get_output_dir(self, trial: Any) -> str:
        return "/runs"

    def store_flos(self) -> None:
        self.calls.append("store_flos")


for name in (
    *LARGE,
    "_load_scaler",
    "_load_rng_state",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_callback_state",
):
    setattr(Stock, name, lambda self, *_, name=name: self.calls.append(name))

# Its methods are the library's, not overrides of a script's.
Stock.__module__ = SavingMixin.__module__


class Subject(SavingMixin, Stock):
    def __init__(self, tmp_path: Path, start: Start | None = None) -> None:
        Stock.__init__(self)
        self._manager = Mock(scratch=tmp_path, static_files={"config.json": b"{}"})
        self._manager.wants.return_value = True
        self._session = TrainCall(
            data=Mock(layout=StepLayout(2, 2, 1), stream=None),
            guard=Mock(recent_losses=None),
            evaluation=Mock(before=None, after=None),
            throughput=Mock(),
            start=start or Start(),
        )
        self._options, self._adapter, self._notices = ResilientOptions(), None, Mock()
        self.args = SimpleNamespace(
            process_index=1,
            local_process_index=0,
            should_save=True,
            load_best_model_at_end=False,
            output_dir="/runs",
        )
        self.state = TrainerState(global_step=20, max_steps=40, log_history=[{"eval_loss": 2.0, "step": 20}])
        self.state.stateful_callbacks = {}
        self.control = TrainerControl()
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.accelerator = SimpleNamespace(scaler=None)
        self.model = self.model_wrapped = torch.nn.Linear(1, 1)
        self.optimizer = self.lr_scheduler = None
        self.processing_class: Any = None
        self.is_fsdp_enabled = False
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = torch.tensor(1.0), 0.0, 20
        self.current_flos = 0
        self.is_in_train = False

    @property
    def saved(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._manager.save.call_args  # type: ignore[attr-defined]
        return args, kwargs


Subject.__module__ = SavingMixin.__module__


def test_a_save_is_a_snapshot_that_is_committed(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    subject._save_checkpoint(None, None)
    (step, samples, own, shared), options = subject.saved
    assert (step, samples, own.keys(), shared.keys()) == (20, 80, {"loop_state_1.json"}, {"trainer_state.json"})
    assert options == {"metrics": {"eval_loss": 2.0}, "wait": False, "commit": True, "generators": None}
    assert json.loads(own["loop_state_1.json"]())["made_for"]["world_size"] == 2
    assert subject.calls == ["store_flos"]


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    subject._manager.wants.return_value = False  # type: ignore[attr-defined]
    subject._save_checkpoint(None, None)
    subject._snapshot(commit=False)
    subject._manager.save.assert_not_called()  # type: ignore[attr-defined]


def test_a_scripts_override_writes_into_a_staging_folder_and_its_files_are_kept(tmp_path: Path) -> None:
    class Script(Stock):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            Path(self._get_output_dir(trial), "checkpoint-20", "own.bin").write_bytes(b"2")

    class Resilient(Subject, Script):
        pass

    subject = Resilient(tmp_path)
    subject._save_checkpoint(None, None)
    (_, _, own, _), _ = subject.saved
    assert own["own.bin"] == b"2" and "model.safetensors" not in own
    # Large state is not written twice, and nothing is uploaded.
    assert subject.calls == ["_save_checkpoint", "store_flos"]
    assert subject._get_output_dir(None) == "/runs" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "commit", "waits"),
    [
        ({}, True, False),
        ({"global_step": 40}, True, True),
        ({"best_global_step": 20}, True, True),
        ({"best_global_step": 20}, False, False),
        ({"best_global_step": 10}, True, False),
    ],
)
def test_the_last_and_the_best_step_are_never_skipped(
    tmp_path: Path, changes: dict[str, int], commit: bool, waits: bool
) -> None:
    subject = Subject(tmp_path)
    subject.args.load_best_model_at_end = True
    for name, value in changes.items():
        setattr(subject.state, name, value)
    subject._snapshot(commit=commit)
    assert subject.saved[1]["wait"] == waits and subject.saved[1]["commit"] == commit
    assert ("store_flos" in subject.calls) == commit


def test_a_stop_ends_training_once_the_snapshot_is_committed(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    session: Any = subject._session
    session.stopping, session.evaluation.before = True, {"python": 1}
    subject.control.should_training_stop = True
    subject._manager.stop.side_effect = Preempted(20)  # type: ignore[attr-defined]
    with pytest.raises(Preempted):
        subject._snapshot(commit=True)
    (_, _, own, _), options = subject.saved
    assert options["wait"] and options["generators"] == {"python": 1}
    subject._notices.notify_all.assert_called_once()  # type: ignore[attr-defined]
    state = json.loads(own["loop_state_1.json"]())
    assert state["evaluation_due"] and not state["ended"]


@pytest.mark.parametrize(("step", "ended"), [(20, True), (40, False)])
def test_training_that_a_callback_ended_stays_ended_unless_it_was_at_its_last_step(
    tmp_path: Path, step: int, ended: bool
) -> None:
    subject = Subject(tmp_path)
    subject.control.should_training_stop, subject.state.global_step = True, step
    assert subject._loop_state().record.ended == ended


@pytest.mark.parametrize(
    ("has_trackers", "is_supervised", "recorded"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_runs_name_is_recorded_where_nobody_else_knows_it(
    tmp_path: Path, has_trackers: bool, is_supervised: bool, recorded: bool
) -> None:
    subject = Subject(tmp_path, Start(run_name="4f1c", is_supervised=is_supervised))
    subject._session.has_trackers = has_trackers
    assert (subject._loop_state().record.run_name == "4f1c") == recorded


def test_configuration_is_written_once_by_the_first_rank_of_a_node(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    subject._manager.static_files = {}
    subject.args.local_process_index = 1
    subject._snapshot(commit=False)
    assert subject.saved[0][3] == {} and subject._manager.static_files == {}
    subject.args.local_process_index = 0
    subject.processing_class = SimpleNamespace(
        save_pretrained=lambda folder: Path(folder, "tokenizer.json").write_bytes(b"{}")
    )
    subject._snapshot(commit=False)
    assert subject._manager.static_files == {"tokenizer.json": b"{}"}


LOADERS = [
    ("_load_from_checkpoint", "restore_model"),
    ("_load_optimizer_and_scheduler", "restore_optimizer"),
    ("_load_scaler", None),
    ("_load_rng_state", "restore_rng"),
]


@pytest.mark.parametrize(("method", "restores"), LOADERS)
def test_a_checkpoint_of_ours_is_restored_by_the_manager(tmp_path: Path, method: str, restores: str | None) -> None:
    stock = Subject(tmp_path)
    getattr(stock, method)("/stock/checkpoint-7")
    assert stock.calls == [method] and not stock._manager.method_calls  # type: ignore[attr-defined]
    ours = Subject(tmp_path, Start(point("file", b"")))
    getattr(ours, method)("/runs/checkpoint-20")
    assert ours.calls == []
    if restores is not None:
        getattr(ours._manager.restoring, restores).assert_called_once_with(ours._session.start.point)


def test_generators_come_from_elsewhere_after_an_evaluation_and_for_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[Any] = []
    monkeypatch.setattr("checkpointing.transformers.saving.rng.set_state", states.append)
    subject = Subject(tmp_path, Start(point("file", b"")))
    session: Any = subject._session
    session.evaluation.after = {"python": 1}
    subject._load_rng_state(None)
    assert states == [{"python": 1}]
    session.evaluation.after, session.data.stream = None, Mock()
    subject._load_rng_state(None)
    subject._manager.restoring.restore_rng.assert_not_called()  # type: ignore[attr-defined]


def test_callbacks_states_are_restored_where_this_run_is_resumed(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    subject, stopping = Subject(tmp_path, Start(point("file", b""))), EarlyStoppingCallback()
    subject.callback_handler.callbacks.append(stopping)
    state = stopping.state()
    state["attributes"]["early_stopping_patience_counter"] = 3
    subject.state.stateful_callbacks = {"EarlyStoppingCallback": state}
    subject._load_callback_state()
    assert stopping.early_stopping_patience_counter == 3
    stock = Subject(tmp_path)
    stock._load_callback_state()
    assert stock.calls == ["_load_callback_state"]


# -- a script's overrides of saving methods, and the files that they add -----------------------------------------------


class Plain(Trainer):
    def compute_loss(self) -> None:
        pass


class Adds(Plain):
    def _save(self) -> None:
        pass


def test_only_a_scripts_own_saving_methods_count() -> None:
    assert [overrides_saving(cls) for cls in (Trainer, Plain, Adds, type("Child", (Adds,), {}))] == [
        False,
        False,
        True,
        True,
    ]


def test_files_of_a_stock_trainer_are_not_added(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("model.safetensors", "model-1-of-2.safetensors", "optimizer.pt", "rng_state_3.pth", "own.bin"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "inner" / "model.safetensors").write_bytes(b"2")
    assert added_files(tmp_path) == {"own.bin": b"1", "inner/model.safetensors": b"2"}
    assert added_files(tmp_path / "missing") == {}


@pytest.mark.parametrize("fails", [False, True])
def test_a_staged_save_leaves_no_trace_in_the_trainer(tmp_path: Path, fails: bool) -> None:
    subject = Subject(tmp_path)
    state = subject.state
    state.stateful_callbacks = {"A": {"n": 1}}
    seen: list[Path] = []
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext(), subject._staged() as folder:
        seen.append(folder)
        assert subject._staging == subject.args.output_dir == str(folder.parent)
        assert folder.name == "checkpoint-20" and folder.is_dir()
        state.stateful_callbacks["A"]["n"] = 2
        if fails:
            raise RuntimeError
    left: Any = (subject._staging, subject.args.output_dir, state.stateful_callbacks)
    assert left == (None, "/runs", {"A": {"n": 1}})
    assert not seen[0].exists() and list(tmp_path.iterdir()) == []


def test_a_staged_save_finds_the_files_of_the_output_folder(tmp_path: Path) -> None:
    """ms-swift copies its arguments from there into each checkpoint."""
    output_dir, scratch = tmp_path / "out", tmp_path / "scratch"
    (output_dir / "checkpoint-10").mkdir(parents=True)
    scratch.mkdir()
    (output_dir / "args.json").write_text("{}")
    subject = Subject(scratch)
    subject.args.output_dir = str(output_dir)
    with subject._staged() as folder:
        assert sorted(path.name for path in folder.parent.iterdir()) == ["args.json", "checkpoint-20"]
        (folder / "args.json").write_text((folder.parent / "args.json").read_text())
        assert added_files(folder) == {"args.json": b"{}"}
    assert (output_dir / "args.json").read_text() == "{}"
