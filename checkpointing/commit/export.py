"""Copies a checkpoint into a plain Hugging Face directory."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.commit.catalog import check_digest
from checkpointing.commit.reading import pieces_of, read_private
from checkpointing.commit.shard_reading import ShardReaders, index_of, read_range, recorded_files
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.format.digest import RunningDigest, algorithm_of, digesting
from checkpointing.format.layout import (
    MASTER_NAME,
    MODEL_INDEX_NAME,
    MODEL_NAME,
    MOST_MODEL_BYTES,
    divided,
    is_of_training,
)
from checkpointing.format.manifest import Manifest
from checkpointing.format.shard_index import FOLDER, INDEX_NAME, SpreadFile
from checkpointing.storage import Storage
from checkpointing.storage.base import CHECKPOINT_PREFIX
from checkpointing.storage.durable import fsync_tree, write_file


def export_checkpoint(
    storage: Storage,
    step: int,
    directory: Path,
    copied: Callable[[int], None] = lambda nbytes: None,
    without: Callable[[str], bool] = lambda name: False,
) -> Manifest:
    """Copy the files of a step into a new directory, and compare their digests; it appears whole or not at all.

    Files that are spread over shards are put together, in a few hundred megabytes of memory whatever their size; of a
    model with more than 5 GB this makes several files and `model.safetensors.index.json`, as Hugging Face does.

    Args:
        storage: Where the checkpoint is.
        step: Its step.
        directory: New or empty directory.
        copied: Called with a number of bytes as they are copied.
        without: Says by its name whether a file is to be left out.

    Returns:
        The checkpoint's manifest.

    Raises:
        InvalidCheckpoint: It is not whole, or a digest differs.
        CheckpointError: The directory exists, or cannot be written.
    """
    manifest = storage.read_manifest(step)
    with _appearing(storage, step, directory) as temporary:
        _copy_files(storage, manifest, temporary, copied, without)
        if manifest.is_sharded:
            _put_together(storage, manifest, temporary, copied, without)
    return manifest


def export_model(
    storage: Storage,
    step: int,
    directory: Path,
    convert: Callable[[Path, Path], None],
    copied: Callable[[int], None] = lambda nbytes: None,
) -> Manifest:
    """Have a step's model converted to a new directory, which appears whole or not at all.

    Args:
        storage: Where the checkpoint is.
        step: Its step.
        directory: New or empty directory.
        convert: Reads the first directory, which has the checkpoint's files without those of training only, but for
            the weights in full precision; fills the second.
        copied: Called with a number of bytes as they are read.

    Returns:
        The checkpoint's manifest.

    Raises:
        InvalidCheckpoint: It is not whole, or a digest differs.
        CheckpointError: The directory exists, or cannot be written.
    """
    manifest = storage.read_manifest(step)

    def without(name: str) -> bool:
        return is_of_training(name) and name != MASTER_NAME

    scratch = directory.with_name(f".{directory.name}.{os.getpid()}.source")
    try:
        with _appearing(storage, step, directory) as temporary:
            convert(readable_directory(storage, step, scratch, copied, without), temporary)
            fsync_tree(temporary)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


@contextlib.contextmanager
def _appearing(storage: Storage, step: int, directory: Path) -> Iterator[Path]:
    """Give a new directory, whose name is `directory` in the end; raises as `export_checkpoint` does."""
    _check_new(directory, storage.directory(step))
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(f"{storage.describe(step)} could not be copied: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidCheckpoint(storage.describe(step), str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def readable_directory(
    storage: Storage,
    step: int,
    scratch: Path,
    copied: Callable[[int], None] = lambda nbytes: None,
    without: Callable[[str], bool] = lambda name: False,
) -> Path:
    """Return a directory with the files of a step, their digests compared, as `export_checkpoint` makes it.

    That is the checkpoint's own where it is whole on this machine; it may hold other files, too. Otherwise it is
    `scratch`, which must not exist. The other arguments, and the errors, are those of `export_checkpoint`.
    """
    manifest, directory = storage.read_manifest(step), storage.directory(step)
    if directory is None or manifest.is_sharded:
        export_checkpoint(storage, step, scratch, copied, without)
        return scratch
    for file in manifest.files:
        if not without(file.name):
            check_digest(storage, manifest, file)
            copied(file.size)
    return directory


def _check_new(directory: Path, checkpoint: Path | None) -> None:
    if directory.resolve() == Path.cwd():
        raise CheckpointError("the current directory is not replaced; name a new one")
    if _is_a_checkpoints(directory, checkpoint):
        raise CheckpointError(f"{directory} is among the run's checkpoints; choose another directory")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists already; choose another directory")


def _copy_files(
    storage: Storage, manifest: Manifest, target: Path, copied: Callable[[int], None], without: Callable[[str], bool]
) -> None:
    """Copy the files that are not spread over shards, and compare their digests."""

    def counted(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            copied(len(piece))

    for file in manifest.files:
        if without(file.name) or (manifest.is_sharded and file.name.startswith(FOLDER)):
            continue
        digest = RunningDigest(algorithm_of(file.digest))
        (target / file.name).parent.mkdir(parents=True, exist_ok=True)
        write_file(target / file.name, digesting(counted(pieces_of(storage.file(manifest, file.name))), digest))
        if digest.result() != file.digest:
            raise InvalidCheckpoint(storage.describe(manifest.step), f"{file.name} was altered: its digest differs")


@dataclass(frozen=True)
class _Output:
    """A file to write, which has a range of the bytes of one that is spread over shards.

    Attributes:
        name: Its name.
        first: Place of the first byte in the spread file.
        last: Place of the last byte, exclusive.
        header: What comes before them.
    """

    name: str
    first: int
    last: int
    header: bytes = b""


def _is_a_checkpoints(directory: Path, checkpoint: Path | None) -> bool:
    """Return whether a run would take a directory for a checkpoint, or for a part of one."""
    if checkpoint is None:
        return False
    target, place = directory.resolve(), checkpoint.parent.resolve()
    return place in target.parents and target.relative_to(place).parts[0].startswith(CHECKPOINT_PREFIX)


def _put_together(
    storage: Storage, manifest: Manifest, folder: Path, copied: Callable[[int], None], without: Callable[[str], bool]
) -> None:
    """Write the files that a checkpoint has in shards.

    Args:
        storage: Where the checkpoint is.
        manifest: Its manifest.
        folder: Where to.
        copied: Called with a number of bytes as they are copied.
        without: Says by its name whether a file is to be left out.

    Raises:
        OSError: They cannot be read or written.
        ValueError: They were altered.
    """
    files = recorded_files(storage, manifest)
    source, recorded = files[INDEX_NAME]
    data, digest = read_private(source, algorithm=algorithm_of(recorded))
    if digest != recorded:
        raise ValueError(f"{INDEX_NAME} was altered: its digest differs")
    readers, index = ShardReaders(files, mapped=False), index_of(data, files)
    for name, file in index.files.items():
        if without(name):
            continue
        outputs = [_Output(name, 0, file.nbytes)]
        if name == MODEL_NAME and file.nbytes > MOST_MODEL_BYTES:
            outputs, weights = _divided(file, readers)
            write_file(folder / MODEL_INDEX_NAME, [memoryview(json.dumps(weights, indent=2).encode())])
        _write_from_shards(file, readers, folder, outputs, copied)


def _write_from_shards(
    file: SpreadFile, readers: ShardReaders, folder: Path, outputs: Sequence[_Output], copied: Callable[[int], None]
) -> None:
    """Write a spread file, shard by shard: each byte is read once, however many shards there are."""
    firsts = [output.first for output in outputs]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context((folder / output.name).open("xb", buffering=0)) for output in outputs]
        for output, target in zip(outputs, opened, strict=True):
            _write_at(target.fileno(), memoryview(output.header), 0)
            target.truncate(len(output.header) + output.last - output.first)
        for piece in sorted((*file.common, *file.pieces), key=lambda piece: (piece.shard, piece.at)):
            done = 0
            for data in readers(piece.shard).read(piece.at, piece.nbytes):
                for place, begin, nbytes in piece.places(done, len(data)):
                    # Before the first output is the header of a file that is divided.
                    for number in range(max(bisect.bisect_right(firsts, place) - 1, 0), len(outputs)):
                        output = outputs[number]
                        first, last = max(place, output.first), min(place + nbytes, output.last)
                        if first < last:
                            part = data[begin + first - place : begin + last - place]
                            _write_at(opened[number].fileno(), part, len(output.header) + first - output.first)
                        if place + nbytes <= output.last:
                            break
                done += len(data)
                copied(len(data))
        for target in opened:
            os.fsync(target.fileno())


def _write_at(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written


def _divided(file: SpreadFile, readers: ShardReaders) -> tuple[list[_Output], dict[str, object]]:
    """Divide a large safetensors file into several (https://huggingface.co/docs/safetensors#format).

    Returns:
        They, and the contents of their index.
    """
    begin = 8 + int.from_bytes(_bytes_of(file, readers, 0, 8), "little")
    header = json.loads(_bytes_of(file, readers, 8, begin))
    metadata = header.pop("__metadata__", {})
    entries = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
    bounds = {name: entry["data_offsets"] for name, entry in entries.items()}
    groups = divided({name: last - first for name, (first, last) in bounds.items()}, MOST_MODEL_BYTES)
    outputs = []
    for name, group in groups.items():
        # The format allows no gaps between tensors.
        start, end = bounds[group[0]][0], bounds[group[-1]][1]
        placed = {
            key: {**entries[key], "data_offsets": [bounds[key][0] - start, bounds[key][1] - start]} for key in group
        }
        text = json.dumps({"__metadata__": metadata, **placed}, separators=(",", ":")).encode()
        # Tensors begin at multiples of 8 bytes, as in the files that the format's own library writes.
        text = text.ljust(-(-len(text) // 8) * 8)
        outputs.append(_Output(name, begin + start, begin + end, len(text).to_bytes(8, "little") + text))
    weight_map = {tensor: name for name, group in groups.items() for tensor in group}
    return outputs, {"metadata": {"total_size": file.nbytes - begin}, "weight_map": weight_map}


def _bytes_of(file: SpreadFile, readers: ShardReaders, first: int, last: int) -> bytes:
    """Return consecutive bytes of a file."""
    target = bytearray(last - first)
    read_range(file, readers, first, memoryview(target))
    return bytes(target)
