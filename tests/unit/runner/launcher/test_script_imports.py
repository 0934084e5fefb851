"""What is loaded before ranks are forked, by what a script's text imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.launcher.script_imports import _OF_LOOP, _OF_TRAINER, EVERYTHING, modules_to_preload

ROOT = Path(__file__).parents[4]


def choice(folder: Path, text: str, **others: str) -> tuple[str, ...]:
    for name, content in {"train": text, **others}.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return modules_to_preload(str(folder / "train.py"))


def test_the_bundled_job_needs_everything() -> None:
    assert modules_to_preload(None) == EVERYTHING


@pytest.mark.parametrize(
    "text",
    [
        "import torch, os.path\nfrom checkpointing import CheckpointManager",
        "from torch.utils.data import DataLoader\nimport numpy as np",
        "print('transformers')  # a word is no import",
        "",
    ],
)
def test_a_bare_loop_waits_for_nothing_else(text: str, tmp_path: Path) -> None:
    assert choice(tmp_path, text) == _OF_LOOP


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import Trainer",
        "import accelerate",
        "from checkpointing.transformers import resilient",
        "from checkpointing import transformers",
        "def main():\n    import datasets",
        "try:\n    import transformers\nexcept ImportError:\n    pass",
    ],
)
def test_a_trainers_script_does_not_wait_for_trl(text: str, tmp_path: Path) -> None:
    assert choice(tmp_path, text) == _OF_TRAINER


@pytest.mark.parametrize(
    "text",
    [
        "from trl import SFTTrainer",
        # Whatever another package may import.
        "import axolotl",
        "import torch, mylib.train",
        "import importlib\nimportlib.import_module('trl')",
        "__import__('trl')",
        "exec('import trl')",
        "from . import helper",
        "def f(:",
    ],
)
def test_a_doubt_loads_everything(text: str, tmp_path: Path) -> None:
    assert choice(tmp_path, text) == EVERYTHING


def test_files_in_the_scripts_folder_are_read_too(tmp_path: Path) -> None:
    helper = "from helper import build\nimport package.part"
    assert (
        choice(tmp_path, helper, helper="import torch", package__in____init__="", package__in__part="import os")
        == _OF_LOOP
    )
    assert choice(tmp_path, helper, helper="import torch", package__in__part="import trl") == EVERYTHING
    assert choice(tmp_path, helper, helper="import transformers", package__in__part="") == _OF_TRAINER
    assert choice(tmp_path, helper, helper="import train", package__in__part="") == _OF_LOOP, "a circle"
    assert choice(tmp_path, helper, helper="def f(:", package__in__part="") == EVERYTHING


def test_a_script_that_cannot_be_read_is_no_error_here(tmp_path: Path) -> None:
    assert modules_to_preload(str(tmp_path / "none.py")) == EVERYTHING
    (tmp_path / "latin.py").write_bytes(b"name = '\xff'")
    assert modules_to_preload(str(tmp_path / "latin.py")) == EVERYTHING


def test_the_examples_start_fast() -> None:
    assert modules_to_preload(str(ROOT / "docs" / "examples" / "loop.py")) == _OF_LOOP
    assert modules_to_preload(str(ROOT / "docs" / "examples" / "hf_trainer.py")) == _OF_TRAINER
