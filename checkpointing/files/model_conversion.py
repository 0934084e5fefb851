"""A checkpoint's model as Hugging Face's files, of another type or in files of another size.

    python -m checkpointing.files.model_conversion SOURCE TARGET [--dtype bf16|fp16|fp32] [--max-shard-bytes N]

Files are mapped, and memory is needed for one of the files that are written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.files.file_images import pieces
from checkpointing.files.safetensors_files import mapped_state, safetensors_image
from checkpointing.format.layout import (
    ADAPTER_NAME,
    MASTER_NAME,
    MODEL_INDEX_NAME,
    MODEL_NAME,
    MOST_MODEL_BYTES,
    divided,
    is_of_training,
)
from checkpointing.format.manifest import MANIFEST_NAME
from checkpointing.process.device import HostDevice
from checkpointing.storage.durable import write_file

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WINDOW_BYTES = 16 * 1024 * 1024


def convert(
    source: Path, target: Path, dtype: torch.dtype | None = None, max_shard_bytes: int = MOST_MODEL_BYTES
) -> None:
    """Write the model of a checkpoint, with its configuration and tokenizer, to a directory.

    Args:
        source: Folder of the checkpoint's files.
        target: An empty folder.
        dtype: Type of the tensors that have floating-point numbers; None leaves them as they are. For single precision,
            parameters are those of the optimizer, where it has them in that precision and the model has not.
        max_shard_bytes: Size of a file of weights at most, where no tensor alone is larger.

    Raises:
        InvalidCheckpoint: There is no model, or it cannot be parsed.
        CheckpointError: A finite number would become infinite.
        OSError: A folder cannot be read or written.
    """
    paths = sorted(source.glob("model*.safetensors")) or sorted(source.glob(ADAPTER_NAME))
    if not paths:
        raise InvalidCheckpoint(str(source), "it has no weights in safetensors files")
    try:
        state = mapped_state(paths)
        masters = mapped_state(source.glob(MASTER_NAME)) if dtype is torch.float32 else {}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidCheckpoint(str(source), f"its weights cannot be parsed ({error})") from error
    for path in source.rglob("*"):
        name = path.relative_to(source).as_posix()
        if (
            path.is_file()
            and path not in paths
            and name not in (MANIFEST_NAME, MODEL_INDEX_NAME)
            and not is_of_training(name)
        ):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
    if dtype is not None:
        _note_dtype(target / "config.json", dtype)
    name = ADAPTER_NAME if paths[0].name == ADAPTER_NAME else MODEL_NAME
    # The optimizer has one name of tied weights.
    precise = {_identity(state[key]): masters[key] for key in masters if key in state}
    state = {key: precise.get(_identity(tensor), tensor) for key, tensor in state.items()}
    _write(target, name, state, dtype, max_shard_bytes)


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    if not path.is_file():
        return
    config = json.loads(path.read_text())
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    path.write_text(json.dumps(config | dict.fromkeys(names, str(dtype).removeprefix("torch.")), indent=2) + "\n")


def _write(
    target: Path, name: str, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    groups = _groups(state, dtype, max_shard_bytes)
    if name != MODEL_NAME:
        groups = {name: list(state)}
    weight_map: dict[str, str] = {}
    total = 0
    for file, group in groups.items():
        converted = _converted({key: state[key] for key in group}, dtype)
        image = safetensors_image(file, converted)
        window = memoryview(bytearray(min(_WINDOW_BYTES, image.nbytes)))
        write_file(target / file, pieces(image, window, HostDevice()))
        # Of tied weights, the owner.
        owners = {_identity(tensor): key for key, tensor in reversed(converted.items())}
        weight_map |= dict.fromkeys(owners.values(), file)
        total += sum(converted[key].nbytes for key in owners.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (target / MODEL_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _groups(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, max_bytes: int) -> dict[str, list[str]]:
    """Return the names in each file, in their order; tied weights are in the file of the first of them."""
    names: dict[tuple[object, ...], list[str]] = {}
    for key, tensor in state.items():
        names.setdefault(_identity(tensor), []).append(key)
    sizes = {group[0]: state[group[0]].numel() * _wanted(state[group[0]], dtype).itemsize for group in names.values()}
    tied = {group[0]: group for group in names.values()}
    return {file: [key for first in group for key in tied[first]] for file, group in divided(sizes, max_bytes).items()}


def _converted(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    done: dict[tuple[object, ...], torch.Tensor] = {}
    found = {}
    for key, tensor in state.items():
        identity = _identity(tensor)
        if identity not in done:
            done[identity] = as_type(key, tensor, dtype)
        found[key] = done[identity]
    return found


def as_type(key: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor, of another type if it has floating-point numbers.

    Raises:
        CheckpointError: A finite number would become infinite.
    """
    converted = tensor.to(_wanted(tensor, dtype))
    if converted.dtype != tensor.dtype:
        infinite = converted.isinf()
        if infinite.any() and (infinite & tensor.double().isfinite()).any():
            name, wider = str(dtype).removeprefix("torch."), "bf16 or fp32" if dtype is torch.float16 else "fp32"
            raise CheckpointError(
                f"{key!r} has numbers that are too large for {name}, and would become infinite; pass --dtype {wider}"
            )
    return converted


def _wanted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tensor.shape, tensor.dtype) if tensor.numel() else (id(tensor),)


def parser() -> argparse.ArgumentParser:
    """Return the options of all conversions."""
    made = argparse.ArgumentParser()
    made.add_argument("source", type=Path)
    made.add_argument("target", type=Path)
    made.add_argument("--dtype", choices=DTYPES)
    made.add_argument("--max-shard-bytes", type=int, default=MOST_MODEL_BYTES)
    return made


def main() -> None:
    """Convert the model of a folder."""
    options = parser().parse_args()
    try:
        convert(options.source, options.target, DTYPES.get(options.dtype), options.max_shard_bytes)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
