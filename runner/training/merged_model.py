"""A checkpoint's adapter merged into the model that it was trained on.

    python -m runner.training.merged_model SOURCE TARGET [--base-model MODEL] [--dtype ...] [--max-shard-bytes N]

The model is loaded whole, in single precision: so the merge rounds once, to the type that is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel

from checkpointing.errors import CheckpointError
from checkpointing.files.model_conversion import DTYPES, as_type, parser
from checkpointing.format.layout import is_of_training

# By the task that an adapter names: the class that has its head. Others are what the base model's configuration says.
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
}


def merge(source: Path, target: Path, base: str | None, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Write the merged model of an adapter, with the tokenizer of the checkpoint.

    Args:
        source: Folder of the checkpoint's files.
        target: An empty folder.
        base: Path or name of the model to merge into; None for the one that the adapter names.
        dtype: Type of the weights; None for the base model's.
        max_shard_bytes: Size of a file of weights at most.

    Raises:
        CheckpointError: There is no adapter, its base cannot be loaded or is quantized, or a finite number would
            become infinite.
    """
    try:
        adapter = json.loads((source / "adapter_config.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{source} has no adapter_config.json: there is no adapter to merge; leave --merge out"
        ) from None
    base = base or str(adapter.get("base_model_name_or_path") or "")
    if not base:
        raise CheckpointError(f"the adapter in {source} does not name its base model; pass --base-model")
    try:
        config = transformers.AutoConfig.from_pretrained(base)
        if getattr(config, "quantization_config", None) is not None:
            raise CheckpointError(
                f"{base} is quantized, and a merge would round again; pass the model it was made of as --base-model"
            )
        model = _class_of(adapter, config).from_pretrained(base, config=config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        text = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"the base model {base!r} cannot be loaded: {text}; pass its path as --base-model"
        ) from None
    merged = PeftModel.from_pretrained(model, source).merge_and_unload()
    dtype = dtype or config.dtype or torch.float32
    for name, tensor in merged.state_dict().items():
        as_type(name, tensor, dtype)
    merged.to(dtype)
    merged.save_pretrained(target, max_shard_size=max_shard_bytes)
    for path in source.iterdir():
        # PEFT's model card describes the adapter.
        is_adapters = path.name.startswith(("adapter_", "README")) or path.suffix == ".safetensors"
        if path.is_file() and not is_adapters and not is_of_training(path.name) and not (target / path.name).exists():
            (target / path.name).write_bytes(path.read_bytes())


def _class_of(adapter: dict[str, Any], config: Any) -> Any:
    name = _CLASSES.get(str(adapter.get("task_type")))
    return getattr(transformers, name or (config.architectures or ["AutoModel"])[0])


def main() -> None:
    """Merge the adapter of a folder."""
    options = parser()
    options.add_argument("--base-model")
    given = options.parse_args()
    try:
        merge(given.source, given.target, given.base_model, DTYPES.get(given.dtype), given.max_shard_bytes)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
