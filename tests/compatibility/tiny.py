"""Models, tokenizers and data small enough for a step to take milliseconds. Nothing comes from a hub."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from compatibility.ranks import Run
from compatibility.table import MAX_STEPS, SAVE_STEPS
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

NUM_ROWS = 14
# No more than the tokenizer has: TRL's ULD loss fails on a generated id that is no token.
VOCABULARY = 262
_WORDS = ["red", "green", "blue", "big", "small", "old", "cat", "dog", "bird", "tree", "house", "car", "runs", "sings"]
_CHAT = (
    "{% for message in messages %}{{ '<' + message['role'][0] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


@functools.cache
def _bytes_tokenizer() -> Tokenizer:
    specials = ["<end>", "<pad>", "<mask>", "<cls>", "<sep>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer() -> Any:
    """One token for each byte, with a chat template that marks what the assistant says."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_bytes_tokenizer(),
        eos_token="<end>",
        pad_token="<pad>",
        mask_token="<mask>",
        cls_token="<cls>",
        sep_token="<sep>",
        unk_token="<unk>",
        model_max_length=64,
    )
    made.chat_template = _CHAT
    return made


def text(number: int, words: int = 4) -> str:
    """Always the same for a number."""
    return " ".join(_WORDS[(number * 5 + place * (place + 3) + 1) % len(_WORDS)] for place in range(words))


def rows(count: int = NUM_ROWS, length: int = 12) -> list[dict[str, Any]]:
    """Token ids, labels and a mask; the first differs in every row."""
    made = []
    for number in range(count):
        ids = [6 + (number * 13 + place * 5 + place * place) % 250 for place in range(length)]
        ids[0] = 6 + number
        made.append({"input_ids": ids, "attention_mask": [1] * length, "labels": ids})
    return made


def lengths(count: int = NUM_ROWS) -> list[dict[str, Any]]:
    """Rows of different lengths."""
    return [{name: values[: 4 + number % 7] for name, values in row.items()} for number, row in enumerate(rows(count))]


def dataset(count: int = NUM_ROWS) -> Dataset:
    return Dataset.from_list(rows(count))


class Rows(torch.utils.data.Dataset[Any]):
    """A map-style data set of PyTorch's own kind."""

    def __init__(self, count: int = NUM_ROWS) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads on the right."""
    longest = max(len(row["input_ids"]) for row in batch)
    fill = {"labels": -100, "attention_mask": 0, "input_ids": 1}
    return {
        name: torch.tensor([list(row[name]) + [value] * (longest - len(row[name])) for row in batch])
        for name, value in fill.items()
    }


def gpt2(dropout: float = 0.1, **options: Any) -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            **{
                "vocab_size": VOCABULARY,
                "n_positions": 64,
                "n_embd": 16,
                "n_layer": 1,
                "n_head": 2,
                "resid_pdrop": dropout,
                "embd_pdrop": dropout,
                "attn_pdrop": dropout,
                "bos_token_id": 0,
                "eos_token_id": 0,
                "pad_token_id": 1,
                **options,
            }
        )
    )


def llama(**options: Any) -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 64,
                "attention_dropout": 0.1,
                "bos_token_id": 0,
                "eos_token_id": 0,
                "pad_token_id": 1,
                **options,
            }
        )
    )


def bert(cls: Any = BertForMaskedLM, **options: Any) -> Any:
    torch.manual_seed(1)
    return cls(
        BertConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
                "pad_token_id": 1,
                **options,
            }
        )
    )


def saved(run: Run, model: Any) -> Any:
    """The model as `from_pretrained` gives it, for trainers that load it a second time by its name."""
    folder = run.folder / "model"
    if run.rank == 0 and not folder.exists():
        model.save_pretrained(run.folder / "unfinished")
        (run.folder / "unfinished").rename(folder)
    while not folder.exists():
        time.sleep(0.01)
    return type(model).from_pretrained(folder)


def stored(run: Run, made: Dataset) -> Dataset:
    """The data set in a file, so that the ranks share what `map` caches."""
    path = run.folder / "rows.json"
    if run.rank == 0 and not path.exists():
        made.to_json(path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return Dataset.from_json(str(path))


def arguments(run: Run, cls: Any = TrainingArguments, **options: Any) -> Any:
    """Of a trainer that takes `MAX_STEPS` steps, of two samples on each rank, and saves every `SAVE_STEPS`."""
    return cls(
        **{
            "output_dir": run.output_dir,
            "use_cpu": True,
            "max_steps": MAX_STEPS,
            "save_steps": SAVE_STEPS,
            "logging_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "disable_tqdm": True,
            "report_to": "none",
            "dataloader_pin_memory": False,
            "bf16": False,
            **options,
        }
    )


class Perceptron(nn.Module):
    """Dropout and batch statistics, returning a loss as models of transformers do."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.last(self.dropout(torch.relu(self.norm(self.first(x))))).squeeze(-1)
        if labels is None:
            return {"logits": out}
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def points(count: int = NUM_ROWS) -> list[dict[str, Any]]:
    """What `Perceptron` is trained on."""
    generator = torch.Generator().manual_seed(2)
    return [
        {"x": torch.randn(12, generator=generator), "labels": torch.randn((), generator=generator)}
        for _ in range(count)
    ]


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int = NUM_ROWS) -> None:
        self.points = points(count)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.points[index]
