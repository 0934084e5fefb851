"""A script's overrides of saving methods, and the files that they add."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Trainer

from checkpointing.transformers.saving import Staging, added_files, overrides_saving


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
    args = SimpleNamespace(output_dir="/runs")
    state = SimpleNamespace(global_step=5, stateful_callbacks={"A": {"n": 1}})
    staging = Staging()
    seen: list[Path] = []
    try:
        with staging.opened(args, state, tmp_path) as folder:
            seen.append(folder)
            assert staging.folder == args.output_dir == str(folder.parent)
            assert folder.name == "checkpoint-5" and folder.is_dir()
            state.stateful_callbacks["A"]["n"] = 2
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert (staging.folder, args.output_dir, state.stateful_callbacks) == (None, "/runs", {"A": {"n": 1}})
    assert not seen[0].exists() and list(tmp_path.iterdir()) == []
