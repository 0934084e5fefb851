"""Where nothing of a program is saved, that is found within a few steps of its optimizers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from checkpointing.agent.events import Committed
from checkpointing.commit.tiers import TrainingStages
from checkpointing.errors import CheckpointError
from runner.training import protection as module
from runner.training.protection import Protection, Unprotected, when_imported

# The attribute of `torch.optim` is gone once it has been imported.
OPTIMIZER: Any = importlib.import_module("torch.optim.optimizer")


class Rank:
    def __init__(self, mode: str = "auto") -> None:
        self.reasons: list[str] = []
        self.protection = Protection(mode, self.reasons.append)
        self.protection._watch_optimizers(OPTIMIZER)
        parameter = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.step()


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingStages]:
    made = TrainingStages()
    monkeypatch.setattr(module, "STAGES", made)
    hooks = OPTIMIZER._global_optimizer_post_hooks
    before = dict(hooks)
    yield made
    hooks.clear()
    hooks.update(before)


def test_a_program_that_saves_nothing_is_named_at_its_third_step_once() -> None:
    rank = Rank()
    rank.step(2)
    assert rank.reasons == []
    rank.step(3)
    assert rank.reasons == ["no Trainer and no CheckpointManager seen"]


def test_slow_steps_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    rank = Rank()
    rank.step(1)
    rank.protection._timer.join(10)
    assert rank.reasons == ["no Trainer and no CheckpointManager seen"]


def test_a_program_that_saves_is_not_named(stages: TrainingStages) -> None:
    rank = Rank("require")
    stages.enter("/somewhere", supervised=True)
    rank.step(5)
    rank.protection._timer.join(10)
    assert rank.reasons == []


def test_what_is_required_ends_the_program() -> None:
    rank = Rank("require")
    with pytest.raises(Unprotected, match=r"nothing is saved: no Trainer and no .* seen; pass --resilient"):
        rank.step(3)


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_trainer_that_cannot_be_protected_is_named_with_the_reason(mode: str) -> None:
    rank = Rank(mode)
    if mode == "require":
        with pytest.raises(Unprotected, match="FSDP1"):
            rank.protection._refuse("FSDP1")
    else:
        rank.protection._refuse("FSDP1")
        rank.step(3)
    assert rank.reasons == ["FSDP1"]


def test_what_was_imported_is_given_at_once() -> None:
    given: list[object] = []
    when_imported("json", given.append)
    assert given == [sys.modules["json"]]


def test_what_is_imported_later_is_given_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given: list[object] = []
    when_imported("imported_later", lambda found: given.append(found.value))
    assert given == []
    found = importlib.import_module("imported_later")
    assert given == [3] and found.__spec__ is not None and type(found.__spec__.loader).__name__ == "SourceFileLoader"
    del sys.modules["imported_later"]


def test_a_program_whose_own_saves_may_be_rare_is_given_time(
    monkeypatch: pytest.MonkeyPatch, stages: TrainingStages
) -> None:
    rank = Rank("require")
    loop = ModuleType("of_the_program")
    loop.dcp = importlib.import_module("torch.distributed.checkpoint")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "of_the_program", loop)
    rank.step(5)
    assert rank.reasons == []
    rank.protection._look()
    assert rank.reasons == ["no Trainer and no CheckpointManager seen"]
    with pytest.raises(Unprotected):
        rank.step(1)


def test_a_program_that_has_saved_by_itself_is_protected() -> None:
    rank = Rank("require")
    rank.protection._saved(Committed(step=1))
    rank.step(5)
    rank.protection._look()
    assert rank.reasons == []


def test_the_first_step_is_reported_once() -> None:
    found: list[str] = []
    protection = Protection("auto", found.append, lambda: found.append("stepped"))
    protection._watch_optimizers(OPTIMIZER)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    optimizer.step()
    assert found == ["stepped"]


def test_hooks_that_come_later_are_called_too() -> None:
    """The hook removed itself while torch walked through them: the third step of such a program raised an error."""
    rank, called = Rank(), list[int]()
    OPTIMIZER.register_optimizer_step_post_hook(lambda *_: called.append(1))
    rank.step(5)
    assert len(called) == 5 and len(rank.reasons) == 1


def test_a_torch_with_other_names_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Libraries import `torch.distributed.checkpoint`, too: a program that does not use it must not fail."""
    import checkpointing.dcp

    def refuse(report: Any) -> None:
        raise CheckpointError("torch 9 has no _save_state_dict")

    monkeypatch.setattr(checkpointing.dcp, "protect", refuse)
    Rank().protection._protect_dcp(ModuleType("torch.distributed.checkpoint"))
    assert "torch.distributed.checkpoint is left as it is: torch 9 has no" in capfd.readouterr().err


def test_a_look_whether_a_module_is_there_does_not_use_up_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers looks for wandb."""
    (tmp_path / "looked_for.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, given = list(sys.meta_path), list[object]()
    when_imported("looked_for", lambda found: given.append(found.value))
    for _ in range(2):
        assert importlib.util.find_spec("looked_for") is not None
    importlib.import_module("looked_for")
    assert given == [3] and sys.meta_path == before
    del sys.modules["looked_for"]


@pytest.mark.parametrize(("mode", "tracks", "continued"), [("auto", True, 1), ("off", True, 0), ("auto", False, 0)])
def test_runs_of_trackers_are_continued_by_the_first_rank(
    mode: str, tracks: bool, continued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ModuleType] = []
    monkeypatch.setattr(module, "CONTINUED", {"json": lambda runs, found: given.append(found)})
    monkeypatch.setattr(module, "when_imported", lambda name, call: call(sys) if name == "json" else None)
    Protection(mode, lambda reason: None, tracks=tracks).begin()
    assert len(given) == continued
