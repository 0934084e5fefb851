"""torchtitan on a CPU: it asks an accelerator for its name and for its memory, and a CPU has neither in torch.

    pretraining.py DATA, in a folder with job.toml

Makes a tokenizer and rows of text where torchtitan looks for them.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

WORDS = ["the", "a", "cat", "dog", "runs", "eats", "sleeps", "big", "small", "red", "blue", "house", "tree", "river"]


def prepare() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=120))} for _ in range(400)]
    for path, text in (
        (Path("tests/assets/c4_test/data.json"), "\n".join(map(json.dumps, rows))),
        (Path("tokenizer/tokenizer_config.json"), json.dumps({"bos_token": "<s>", "eos_token": "</s>"})),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.save("tokenizer/tokenizer.json")


def stand_in_for_an_accelerator() -> None:
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    missing = {
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 34, name="cpu"),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
    }
    for name, value in missing.items():
        setattr(torch.cpu, name, value)


if __name__ == "__main__":
    sys.argv[1:] = ["--job.config_file", "job.toml"]
    if not Path("tokenizer/tokenizer.json").exists():
        prepare()
    stand_in_for_an_accelerator()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
