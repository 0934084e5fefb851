"""The bytes of one verified state, and what can be parsed from them."""

from __future__ import annotations

import io
import json
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.layout import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    WEIGHTS_NAMES,
)
from checkpointing.rank import rng
from checkpointing.rank.torch_files import storage_records
from checkpointing.rank.torch_reader import check_archive, filled, model_state, plain
from checkpointing.rank.trees import replaced
from checkpointing.reading import MemoryFile

# Larger files are kept out of a directory that is made of a snapshot for others to read.
SMALL_BYTES = 64 * 1024 * 1024


class RestorePoint:
    """A state whose bytes have been read and verified. Everything is parsed without running code from it.

    Attributes:
        place: what it is called in messages.
        step, world_size, samples_consumed: the manifest's.
        private: the tensors of `torch_object` are the reader's own; otherwise, and those of `model_state` always, they
            must be copied before anything changes them.
    """

    def __init__(
        self,
        place: str,
        *,
        step: int,
        world_size: int,
        samples_consumed: int,
        files: Mapping[str, memoryview],
        path: Path | None,
        private: bool,
        scratch: Path | None = None,
    ) -> None:
        self.place = place
        self.step = step
        self.world_size = world_size
        self.samples_consumed = samples_consumed
        self.private = private
        self._files = dict(files)
        self._path = path
        self._scratch = scratch
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def has(self, name: str) -> bool:
        return name in self._files

    @property
    def directory(self) -> Path:
        """A directory with at least the small files, for readers that want one; gone with `close`."""
        if self._path is not None:
            return self._path
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="checkpoint-snapshot-", dir=self._scratch)
            folder = Path(self._temporary.name) / f"checkpoint-{self.step}"
            folder.mkdir()
            for name, data in self._files.items():
                if len(data) <= SMALL_BYTES and name not in (*WEIGHTS_NAMES, OPTIMIZER_NAME):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(data)
        return Path(self._temporary.name) / f"checkpoint-{self.step}"

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Around what is made of a file's contents: whatever they do to a parser, the file is named.

        Raises:
            InvalidCheckpoint: in place of any other error.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            text = f"{type(error).__name__}: {first_line}".encode(errors="replace").decode()
            raise InvalidCheckpoint(
                self.place,
                f"{name} is as it was written, but makes no sense ({textwrap.shorten(text, 300)}); resume from another "
                "step",
            ) from error

    def model_state(self, name: str = MODEL_NAME) -> dict[str, torch.Tensor]:
        """The model's state dict on the CPU, aliases of tied weights included. May be asked for once.

        Raises:
            InvalidCheckpoint: there is none, or it makes no sense.
            CheckpointError: the checkpoint holds a whole model where an adapter is wanted, or the other way round.
        """
        other = next((other for other in WEIGHTS_NAMES if other != name and self.has(other)), None)
        if other is not None and not self.has(name):
            raise CheckpointError(
                f"{self.place} holds {other}, this training saves {name}. Use the method that wrote it (full or an "
                "adapter), or another output_dir."
            )
        buffer = self._data(name)
        del self._files[name]
        with self.reading(name):
            return model_state(buffer)

    def torch_object(self, name: str) -> Any:
        """What `torch.save` put into a file. Its tensors share the bytes that were read, so ask for a file once.

        Raises:
            InvalidCheckpoint: there is no such file, or it makes no sense.
        """
        buffer = self._data(name)
        if name == OPTIMIZER_NAME:
            del self._files[name]
        with self.reading(name), torch.serialization.safe_globals(rng.SAFE_GLOBALS):
            check_archive(buffer)
            if len(buffer) <= SMALL_BYTES and name != OPTIMIZER_NAME:
                found = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
                return replaced(found, plain)
            # Everything but the tensors' bytes; no memory is touched for those.
            with skip_data():
                skeleton = torch.load(io.BufferedReader(MemoryFile(buffer)), map_location="cpu", weights_only=True)
            return filled(skeleton, buffer, storage_records(io.BufferedReader(MemoryFile(buffer))))

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file.

        Raises:
            InvalidCheckpoint: there is no such file, or it makes no sense.
        """
        data = bytes(self._data(name))
        with self.reading(name):
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("it is not a JSON object")
            return found

    def _data(self, name: str) -> memoryview:
        if name not in self._files:
            raise InvalidCheckpoint(self.place, f"{name} is not in it; resume from another step")
        return self._files[name]

    def close(self) -> None:
        """Forget the bytes that nobody has asked for."""
        self._files.clear()
        if self._temporary is not None:
            self._temporary.cleanup()
