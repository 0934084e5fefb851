"""What two checkpoints differ by, and by how much."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bomb import Bomb
from safetensors.torch import save_file

from checkpointing.errors import InvalidCheckpoint
from checkpointing.files import differences as compared
from checkpointing.files.differences import Difference, differences, main

MODEL = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(3)}
OPTIMIZER = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]}
TRAINER = {"global_step": 3, "log_history": [{"loss": 1.0, "train_runtime": 3.5}]}


def folder(
    path: Path,
    model: dict[str, torch.Tensor] | None = None,
    optimizer: Any = OPTIMIZER,
    trainer: Any = TRAINER,
) -> Path:
    path.mkdir()
    save_file(MODEL if model is None else model, path / "model.safetensors")
    torch.save(optimizer, path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps(trainer))
    return path


def found(a: Path, b: Path) -> list[Difference]:
    return list(differences(a, b))


def of_tensors(a: torch.Tensor, b: torch.Tensor, tmp_path: Path) -> Difference:
    [only] = found(folder(tmp_path / "a", {"x": a}), folder(tmp_path / "b", {"x": b}))
    return only


def test_equal_checkpoints_have_none(tmp_path: Path) -> None:
    later = {**TRAINER, "log_history": [{"loss": 1.0, "train_runtime": 99.0}]}
    assert found(folder(tmp_path / "a"), folder(tmp_path / "b", trainer=later)) == []


def test_values_differ_by_so_much(tmp_path: Path) -> None:
    only = of_tensors(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 2.0, 0.0]), tmp_path)
    assert (only.file, only.name, only.kind) == ("model.safetensors", "x", "values")
    assert (only.num_different, only.num_elements, only.max_abs, only.max_rel, only.norm_rel) == (1, 3, 2.0, 0.5, 0.4)
    assert str(only) == ("model.safetensors: x: 1 of 3 elements differ, by 2 at most (relative 0.5), 0.4 of its norm")


def test_all_pieces_of_a_tensor_count(tmp_path: Path) -> None:
    a = torch.ones((1 << 20) * 2 + 5)
    b = a.clone()
    b[0], b[-1] = 2.0, 4.0
    only = of_tensors(a, b, tmp_path)
    assert (only.num_different, only.max_abs, only.max_rel) == (2, 3.0, 0.75)
    assert only.norm_rel == pytest.approx(math.sqrt(10 / len(a)))


def test_the_exit_code_says_whether_they_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", {"weight": MODEL["weight"]})
    for others, code in (([a], 0), ([b], 3), ([b, "--without=model.safetensors"], 0)):
        monkeypatch.setattr("sys.argv", ["differences", str(a), *map(str, others), "--json"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8])
def test_every_type_is_compared(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0]).to(dtype)
    only = of_tensors(a, torch.tensor([1.0, 4.0]).to(dtype), tmp_path)
    assert (only.num_different, only.max_abs, only.max_rel) == (1, 2.0, 0.5)


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    only = of_tensors(torch.tensor([nan, nan, 1.0, 2.0]), torch.tensor([nan, 1.0, inf, 3.0]), tmp_path)
    assert (only.num_different, only.num_not_finite, only.max_abs) == (3, 2, 1.0)
    json.dumps(only.to_json(), allow_nan=False)


def test_bits_count_also_where_values_are_equal(tmp_path: Path) -> None:
    only = of_tensors(torch.tensor([0.0]), torch.tensor([-0.0]), tmp_path)
    assert (only.num_different, only.max_abs, only.norm_rel) == (1, 0.0, None)


def test_types_and_shapes_and_names(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", {"typed": torch.tensor([1.5, 1.001]), "shaped": torch.ones(4), "gone": torch.ones(2)})
    other = {"typed": torch.tensor([1.5, 1.0]).bfloat16(), "shaped": torch.ones(2, 2), "new": torch.ones(1)}
    b = folder(tmp_path / "b", other)
    by_name = {one.name: one for one in found(a, b)}
    assert by_name["typed"].kind == "type" and by_name["typed"].num_different == 1
    assert (by_name["typed"].a, by_name["typed"].b) == ("float32 [2]", "bfloat16 [2]")
    assert (by_name["shaped"].kind, by_name["shaped"].a, by_name["shaped"].b) == (
        "shape",
        "float32 [4]",
        "float32 [2, 2]",
    )
    assert by_name["gone"].kind == "removed" and by_name["new"].kind == "added"
    assert str(by_name["new"]) == "model.safetensors: new: added (float32 [1])"


def test_optimizer_and_trainer(tmp_path: Path) -> None:
    state = {"step": torch.tensor(4.0), "exp_avg": torch.ones(2, 3)}
    optimizer = {"state": {0: state}, "param_groups": [{"lr": 0.05}]}
    trainer = {"global_step": 4, "log_history": [{"loss": 1.0}, {"loss": 0.5}]}
    lines = [str(one) for one in found(folder(tmp_path / "a"), folder(tmp_path / "b", None, optimizer, trainer))]
    assert lines == [
        "optimizer.pt: state.0.step: 1 of 1 elements differ, by 1 at most (relative 0.25), 0.333 of its norm",
        "optimizer.pt: param_groups.0.lr: other value (0.1 and 0.05)",
        "trainer_state.json: global_step: other value (3 and 4)",
        "trainer_state.json: log_history.1: added (1 entries)",
    ]


def test_files(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b")
    for path, text in ((a, "x"), (b, "y")):
        (path / "rng_state.pth").write_text(text)
        (path / "vocabulary.txt").write_text(text)
        (path / "manifest.json").write_text(text)
    (b / "scheduler.pt").touch()
    assert [(one.file, one.kind) for one in found(a, b)] == [
        ("rng_state.pth", "bytes"),
        ("scheduler.pt", "added"),
        ("vocabulary.txt", "bytes"),
    ]
    assert list(differences(a, b, frozenset(("rng_state.pth", "scheduler.pt", "vocabulary.txt")))) == []


def test_weights_in_several_files_are_those_of_one(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b")
    (b / "model.safetensors").unlink()
    save_file({"weight": MODEL["weight"]}, b / "model-00001-of-00002.safetensors")
    save_file({"bias": MODEL["bias"] * 2}, b / "model-00002-of-00002.safetensors")
    (b / "model.safetensors.index.json").write_text("{}")
    assert [(one.file, one.name) for one in found(a, b)] == [("model.safetensors", "bias")]


def test_what_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b")
    (b / "optimizer.pt").write_bytes(b"nonsense")
    with pytest.raises(InvalidCheckpoint, match=r"b.*optimizer\.pt"):
        found(a, b)


def test_no_code_is_run(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", None, Bomb(tmp_path / "ran"))
    with pytest.raises(InvalidCheckpoint, match=r"optimizer\.pt"):
        found(a, b)
    assert not (tmp_path / "ran").exists()


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(30_000_000)
    a, b = folder(tmp_path / "a", {"x": ones}), folder(tmp_path / "b", {"x": ones.mul_(2)})
    used: list[int] = []
    piece = compared._other_bits

    def measured(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        status = Path("/proc/self/status").read_text()
        used.append(int(status.partition("RssAnon:")[2].split()[0]))
        return piece(x, y)

    monkeypatch.setattr(compared, "_other_bits", measured)
    [only] = found(a, b)
    assert (only.num_different, only.max_abs, len(used)) == (30_000_000, 1.0, 115)
    # A copy of one of them has 120 MB, in double precision 240.
    assert max(used) - used[0] < 60_000
