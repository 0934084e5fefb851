from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from checkpointing.process import device
from runner.config.schema import DataConfig
from runner.training.model import choose_attention, trained_tokenizer
from runner.training.training_data import BUNDLED, load_training_data


def test_the_bundled_data_is_clean(tmp_path: Path) -> None:
    data, _ = load_training_data(DataConfig(), tmp_path, seed=0)
    assert data.column_names == ["prompt", "completion"] and len(data) >= 300
    prompts, completions = data["prompt"], data["completion"]
    assert len(set(prompts)) == len(prompts) and len(set(completions)) == len(completions)
    assert all(text.isascii() and text.strip() for text in [*prompts, *completions])
    assert BUNDLED.stat().st_size < 1_000_000


def test_the_tokenizer_is_cached_by_content_and_loses_nothing(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["How do I light a fire?"], "completion": [" With dry tinder."]})
    first = trained_tokenizer(data, 400, tmp_path)
    folder = next(tmp_path.iterdir())
    made = folder.stat().st_mtime_ns
    again = trained_tokenizer(data, 400, tmp_path)
    assert list(tmp_path.iterdir()) == [folder] and folder.stat().st_mtime_ns == made
    text = "Feuer \u00fcber Eis? \n\t 100 %"
    assert first.decode(first(text)["input_ids"]) == text == again.decode(again(text)["input_ids"])
    assert {first.eos_token, first.pad_token} == {"<|im_end|>", "<|pad|>"}


@pytest.mark.parametrize(
    ("importable", "gpu", "capability", "bf16", "expected"),
    [
        (True, True, (9, 0), True, "flash_attention_2"),
        (True, True, (7, 5), True, "sdpa"),
        (True, True, (9, 0), False, "sdpa"),
        (False, True, (9, 0), True, "sdpa"),
        (True, False, None, True, "sdpa"),
    ],
)
def test_attention(
    importable: bool,
    gpu: bool,
    capability: tuple[int, int] | None,
    bf16: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.training.model.is_flash_attn_2_available", lambda: importable)
    monkeypatch.setattr(device, "capability", lambda: capability if gpu else None)
    assert choose_attention("auto", bf16=bf16) == expected
    assert choose_attention("eager", bf16=bf16) == "eager"
