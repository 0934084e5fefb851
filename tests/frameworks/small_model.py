"""Writes a Llama of two layers with its tokenizer, and data in the forms that frameworks read, into a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"


def _tokenizer() -> Any:
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = {
        token: number for number, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=256,
    )
    made.chat_template = _CHAT
    return made


def write(folder: Path) -> None:
    """Write everything."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sums = [(f"what is {one} plus {other}?", f"the answer is {one + other}") for one in range(40) for other in range(5)]
    pairs = [{"instruction": question, "input": "", "output": answer} for question, answer in sums]
    chosen = [{"instruction": q, "input": "", "chosen": a, "rejected": "I do not know"} for q, a in sums]
    ranked = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "sums": {"file_name": "pairs.json"},
        "preferences": {"file_name": "chosen.json", "ranking": True, "columns": ranked},
    }
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in sums]
    preferences = [
        {"prompt": [turn[0]], "chosen": [turn[1]], "rejected": [{"role": "assistant", "content": "I do not know"}]}
        for turn in turns
    ]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    (folder / "chosen.json").write_text(json.dumps(chosen))
    (folder / "dataset_info.json").write_text(json.dumps(info))
    _lines(folder / "pairs.jsonl", pairs)
    _lines(folder / "messages.jsonl", [{"messages": turn} for turn in turns])
    _lines(folder / "preferences.jsonl", preferences)
    _lines(folder / "texts.jsonl", [{"text": f"{q} {a}"} for q, a in sums])


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
