"""Two checkpoints are the same, or it is said where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runner.chaos.compare import course_differences, differences


def checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    weight = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) / 7
    save_file({"layer.weight": weight * changes.get("scale", 1.0)}, folder / "model.safetensors")
    step = changes.get("step", 5.0)
    torch.save({"state": {0: {"step": torch.tensor(step)}}, "param_groups": [{"lr": 0.1}]}, folder / "optimizer.pt")
    entry = {
        "step": 5,
        "loss": changes.get("loss", 1.5),
        "num_tokens": changes.get("tokens", 9.0),
        "train_runtime": changes.get("runtime", 1.0),
        "total_flos": changes.get("operations", 7.0),
    }
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [entry], "global_step": 5}))
    (folder / "config.json").write_text(changes.get("config", "{}"))
    (folder / "rng_state.pth").write_bytes(changes.get("generators", b"state"))
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"runtime": 2.0, "operations": 8.0}, ""),
        ({"tokens": 5.0}, "trainer_state.json: log_history.0.num_tokens: 9.0 and 5.0"),
        ({"config": "[]"}, "config.json: other bytes"),
        ({"scale": 1.01}, "model.safetensors: layer.weight"),
        ({"step": 6.0}, "optimizer.pt: state.0.step"),
        ({"loss": 1.6}, "trainer_state.json: log_history.0.loss: 1.5 and 1.6"),
    ],
)
def test_virtual_ranks_that_ended_on_other_numbers_of_ranks(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", **change)
    for folder, name in ((a, "rng_state_0.pth"), (b, "rng_state.pth")):
        (folder / "rng_state.pth").unlink()
        torch.save({"cpu": torch.arange(3)}, folder / name)
    for name in ("loop_state_1.json", "data_state_1.pth", "rank_state_1.pt"):
        (a / name).write_text("{}")
    found = differences(a, b, any_ranks=True)
    assert found == [] if not named else (len(found) == 1 and found[0].startswith(named))
    torch.save({"cpu": torch.arange(4)}, b / "rng_state.pth")
    assert differences(a, b, any_ranks=True) == ["torch's generator of the first rank differs", *found]


def test_the_same_bits_at_other_times(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", runtime=2.0)
    assert differences(a, b) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scale": 1.01}, "model.safetensors: layer.weight differs by 0.0"),
        ({"step": 6.0}, "optimizer.pt: state.0.step differs by"),
        ({"loss": 1.5000001}, "trainer_state.json: log_history.0.loss: 1.5 and 1.5000001"),
        ({"config": "[]"}, "config.json: other bytes"),
        ({"generators": b"other"}, "rng_state.pth: the generators' states differ"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    (found,) = differences(checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", **change))
    assert found.startswith(told)


def test_a_file_of_one_only(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    (b / "extra.bin").touch()
    assert differences(a, b) == ["extra.bin is in one of the two only"]


def test_a_tolerance_is_a_share_of_the_norm(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", scale=1.01, loss=1.50001)
    assert differences(a, b, 0.05) == []
    assert len(differences(a, b, 1e-6)) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scale": 1.5, "loss": 1.51, "generators": b"other"}, ""),
        ({"loss": 1.56}, "trainer_state.json: log_history.0.loss: 1.5 and 1.56"),
        ({"tokens": 9.1}, ""),
        ({"tokens": 10.0}, "trainer_state.json: log_history.0.num_tokens: 9.0 and 10.0"),
        ({"scale": float("nan")}, "model.safetensors: layer.weight is not finite"),
    ],
)
def test_the_course_of_two_trainings(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    found = course_differences(checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", **change), 0.02)
    assert found == ([told] if told else [])
