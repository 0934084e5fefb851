"""Copies a checkpoint into a plain Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from checkpointing.digest import RunningDigest, algorithm_of, digesting
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.layout import MODEL_NAME
from checkpointing.manifest import Manifest
from checkpointing.reading import pieces_of, read_private
from checkpointing.shard_reading import ShardReaders, index_of, read_range, recorded_files
from checkpointing.shards import FOLDER, INDEX_NAME, SpreadFile
from checkpointing.storage import Storage
from checkpointing.storage.direct_io import write_file

# What Hugging Face writes into one file of weights at most.
_MOST_BYTES = 5 * 10**9
_WINDOW_BYTES = 32 * 1024 * 1024


def export_checkpoint(
    storage: Storage, step: int, directory: Path, copied: Callable[[int], None] = lambda nbytes: None
) -> Manifest:
    """Copy the files of a step into a new directory, and compare their digests; it appears whole or not at all.

    Files that are spread over shards are put together, in a few hundred megabytes of memory whatever their size; of a
    model with more than 5 GB this makes several files and `model.safetensors.index.json`, as Hugging Face does.

    Args:
        storage: Where the checkpoint is.
        step: Its step.
        directory: New or empty directory.
        copied: Called with a number of bytes as they are copied.

    Returns:
        The checkpoint's manifest.

    Raises:
        InvalidCheckpoint: It is not whole, or a digest differs.
        CheckpointError: The directory exists, or cannot be written.
    """
    manifest = storage.read_manifest(step)
    if directory.resolve() == Path.cwd():
        raise CheckpointError("the current directory is not replaced; name a new one")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists already; choose another directory")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")

    def counted(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            copied(len(piece))

    try:
        temporary.mkdir(parents=True)
        for file in manifest.files:
            if manifest.is_sharded and file.name.startswith(FOLDER):
                continue
            digest = RunningDigest(algorithm_of(file.digest))
            (temporary / file.name).parent.mkdir(parents=True, exist_ok=True)
            write_file(temporary / file.name, digesting(counted(pieces_of(storage.file(manifest, file.name))), digest))
            if digest.result() != file.digest:
                raise InvalidCheckpoint(storage.describe(step), f"{file.name} was altered: its digest differs")
        if manifest.is_sharded:
            for name, pieces in _put_together(storage, manifest):
                write_file(temporary / name, counted(pieces))
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(f"{storage.describe(step)} could not be copied: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidCheckpoint(storage.describe(step), str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _put_together(storage: Storage, manifest: Manifest) -> Iterator[tuple[str, Iterator[memoryview]]]:
    """Yield name and contents of the files that a checkpoint has in shards.

    Raises:
        OSError: They cannot be read.
        ValueError: They were altered.
    """
    files = recorded_files(storage, manifest)
    source, recorded = files[INDEX_NAME]
    index, digest = read_private(source, algorithm=algorithm_of(recorded))
    if digest != recorded:
        raise ValueError(f"{INDEX_NAME} was altered: its digest differs")
    readers = ShardReaders(files, mapped=False)
    for name, file in index_of(index, files).files.items():
        if name == MODEL_NAME and file.nbytes > _MOST_BYTES:
            yield from _divided(file, readers)
        else:
            yield name, _bytes_of(file, readers, 0, file.nbytes)


def _bytes_of(file: SpreadFile, readers: ShardReaders, first: int, last: int) -> Iterator[memoryview]:
    """Yield consecutive bytes of a file, through memory that every piece uses again."""
    window = memoryview(bytearray(min(_WINDOW_BYTES, last - first)))
    while first < last:
        piece = window[: last - first]
        read_range(file, readers, first, piece)
        yield piece
        first += len(piece)


def _divided(file: SpreadFile, readers: ShardReaders) -> Iterator[tuple[str, Iterator[memoryview]]]:
    """Yield a large safetensors file as several, and their index (https://huggingface.co/docs/safetensors#format)."""
    begin = 8 + int.from_bytes(_joined(_bytes_of(file, readers, 0, 8)), "little")
    header = json.loads(_joined(_bytes_of(file, readers, 8, begin)))
    metadata = header.pop("__metadata__", {})
    groups: list[dict[str, Mapping[str, object]]] = [{}]
    bounds: list[tuple[int, int]] = []
    start = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        if groups[-1] and last - start > _MOST_BYTES:
            bounds.append((start, first))
            groups.append({})
            start = first
        groups[-1][name] = {**entry, "data_offsets": [first - start, last - start]}
    bounds.append((start, file.nbytes - begin))
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    for name, group, (first, last) in zip(names, groups, bounds, strict=True):
        text = json.dumps({"__metadata__": metadata, **group}, separators=(",", ":")).encode()
        # Tensors begin at multiples of 8 bytes, as in the files that the format's own library writes.
        text = text.ljust(-(-len(text) // 8) * 8)
        yield name, _with_header(text, _bytes_of(file, readers, begin + first, begin + last))
    weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": file.nbytes - begin}, "weight_map": weight_map}
    yield f"{MODEL_NAME}.index.json", iter([memoryview(json.dumps(index, indent=2).encode())])


def _joined(pieces: Iterator[memoryview]) -> bytes:
    """Return all bytes of pieces that use the same memory."""
    return b"".join(bytes(piece) for piece in pieces)


def _with_header(text: bytes, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    yield memoryview(len(text).to_bytes(8, "little") + text)
    yield from pieces
