"""The model and its tokenizer: loaded by name, or a small SmolLM3 built from scratch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from safetensors.torch import save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from transformers.utils import is_flash_attn_2_available

from checkpointing.process import device
from runner.config.schema import MeshConfig, MethodConfig, ModelConfig

# Rows of a stream that the tokenizer is trained on, because its end may never be reached.
_TOKENIZER_ROWS = 10_000
_END = "<|im_end|>"
_PAD = "<|pad|>"
# ChatML, for data in the form of messages.
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(
    config: ModelConfig,
    method: MethodConfig,
    dataset: Any,
    cache: Path,
    *,
    bf16: bool,
    seed: int,
    mesh: MeshConfig | None = None,
    outline: bool = False,
) -> tuple[Any, Any]:
    """Build the model to train and its tokenizer, identical on every rank and in every attempt.

    The state of the random generators is identical afterwards, too. A new model's tokenizer is trained on the data set.
    The mesh says how tensors are distributed over the ranks while they are loaded. An `outline` is a model without
    weights, on the meta device; the files of one with a name are only fetched.

    Raises:
        ValueError: transformers cannot distribute a model over a mesh.
        OSError: The model cannot be loaded.
    """
    options: dict[str, Any] = {"device_map": "meta"} if outline else {}
    if method.type == "qlora" and not outline:
        options = _quantized(bf16=bf16)
    if mesh is not None:
        options |= _distributed(mesh)
    if config.name_or_path is not None:
        with _naming(config.name_or_path):
            tokenizer = transformers.AutoTokenizer.from_pretrained(config.name_or_path)
        model = load_model(config, bf16=bf16, **options)
        # The trainer initialises adapters at random next.
        torch.manual_seed(seed)
        return model, tokenizer
    tokenizer = trained_tokenizer(dataset, config.vocab_size, cache)
    torch.manual_seed(seed)
    model_config = SmolLM3Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation=choose_attention(config.attn_implementation, bf16=bf16),
        **config.config,
    )
    with torch.device("meta") if outline else contextlib.nullcontext():
        model = SmolLM3ForCausalLM(model_config)
    if mesh is not None:
        model = _reloaded(model, cache, options)
        torch.manual_seed(seed)
    return model, tokenizer


def _distributed(mesh: MeshConfig) -> dict[str, Any]:
    """Return the options of `from_pretrained` that distribute a model; ValueError where transformers cannot."""
    try:
        from transformers import DistributedConfig
    except ImportError:
        raise ValueError(
            f"a strategy that is a mesh needs a newer transformers than {transformers.__version__}: "
            "pip install -U transformers"
        ) from None
    replicas = int(os.environ["WORLD_SIZE"]) // mesh.ranks
    sizes = {"tp_size": mesh.tp, "fsdp_size": mesh.dp_shard, "dp_replicate_size": replicas}
    return {"distributed_config": DistributedConfig(**sizes)}


def _reloaded(model: Any, cache: Path, options: dict[str, Any]) -> Any:
    """Return a new model with options of `from_pretrained`: transformers distributes what it loads."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="model-") as folder:
        # Not `save_pretrained`, which writes on the first of all ranks only: other nodes cannot read that one's cache.
        model.config.save_pretrained(folder)
        save_model(model, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})
        loaded = type(model).from_pretrained(
            folder, dtype=torch.float32, attn_implementation=model.config._attn_implementation, **options
        )
    # The folder is no place that anybody could load it from.
    loaded.config._name_or_path = ""
    return loaded


def load_model(config: ModelConfig, *, bf16: bool, **options: Any) -> Any:
    """Load the model that is configured by name, in bfloat16 or float32, with further options of `from_pretrained`.

    Raises:
        OSError: It cannot be loaded.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    attention = choose_attention(config.attn_implementation, bf16=bf16)
    with _naming(config.name_or_path):
        return transformers.AutoModelForCausalLM.from_pretrained(
            config.name_or_path, dtype=dtype, attn_implementation=attention, **options, **config.config
        )


@contextlib.contextmanager
def _naming(name: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The error of transformers does not always name the model.
        raise OSError(f"model.name_or_path={name!r} cannot be loaded: {error}") from error


def adapter_config(method: MethodConfig) -> Any:
    """Return the `LoraConfig` for `SFTTrainer`; None if every weight is trained."""
    if method.type == "full":
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=method.r,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=method.target_modules,
        modules_to_save=method.modules_to_save or None,
        task_type="CAUSAL_LM",
    )


def _quantized(*, bf16: bool) -> dict[str, Any]:
    """Return options for 4-bit NormalFloat with double quantisation, as in the QLoRA paper (arXiv 2305.14314)."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # FSDP shards it together with the other parameters of a layer, which must be of one type.
        bnb_4bit_quant_storage=dtype,
    )
    where = int(os.environ["LOCAL_RANK"]) if device.kind() == "cuda" else "cpu"
    return {"quantization_config": config, "device_map": {"": where}}


def choose_attention(wanted: str, *, bf16: bool) -> str:
    """Resolve `attn_implementation`.

    `auto` means flash-attn if it can be imported, the GPU has compute capability 8.0 or higher, and training uses bf16.
    """
    if wanted != "auto":
        return wanted
    if bf16 and is_flash_attn_2_available() and (device.capability() or (0, 0)) >= (8, 0):
        return "flash_attention_2"
    return "sdpa"


def trained_tokenizer(dataset: Any, vocab_size: int, cache: Path) -> Any:
    """Return a byte-level BPE tokenizer trained on the text of rows, or of a stream of them, cached by its content."""
    is_stream = isinstance(dataset, datasets.IterableDataset)
    texts = list(_texts(dataset.take(_TOKENIZER_ROWS) if is_stream else dataset))
    key = hashlib.sha256(json.dumps([vocab_size, texts]).encode()).hexdigest()[:16]
    folder = cache / f"tokenizer-{key}"
    if not folder.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=[_END, _PAD],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=_END, pad_token=_PAD)
        tokenizer.chat_template = _CHAT
        cache.mkdir(parents=True, exist_ok=True)
        # Ranks race. Each writes its own copy, the first rename wins, and all copies are equal.
        own = Path(tempfile.mkdtemp(dir=cache))
        tokenizer.save_pretrained(own)
        try:
            own.rename(folder)
        except OSError:
            shutil.rmtree(own)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def _texts(dataset: Any) -> Iterator[str]:
    for row in dataset:
        for value in row.values():
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                yield from (message.get("content") or "" for message in value if isinstance(message, dict))


class BaseWeights(transformers.TrainerCallback):
    """Loads the weights when training begins, unless a checkpoint was resumed; until then, parameters have none.

    A model that was loaded by name is backed by memory-mapped files, whose pages are read on first access. A restarted
    rank that moved it to its GPU would read and copy all of them, only for the restore to overwrite them. So the
    parameters are memory of the device at first, and `load` loads the same model, without drawing random numbers that
    matter.
    """

    def __init__(self, model: torch.nn.Module, load: Callable[[], torch.nn.Module], device: torch.device) -> None:
        self._model, self._load = model, load
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = torch.empty_like(parameter, device=device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the weights if nothing was resumed."""
        # A checkpoint is of step 1 or later and contains every parameter, because it is loaded strictly.
        if state.global_step > 0:
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            loaded = dict(self._load().named_parameters())
            for name, parameter in self._model.named_parameters():
                parameter.copy_(loaded[name])
