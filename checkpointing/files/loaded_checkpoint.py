"""The bytes of one verified checkpoint or snapshot, and their parsing."""

from __future__ import annotations

import copy
import functools
import io
import json
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from checkpointing.commit.reading import MemoryFile
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.files import safetensors_files, sharding
from checkpointing.files.spread_files import SpreadFiles
from checkpointing.files.torch_files import check_archive, filled, plain, storage_records
from checkpointing.format.layout import MODEL_NAME, OPTIMIZER_NAME, WEIGHTS_NAMES, rank_object_name
from checkpointing.process import rng
from checkpointing.process.trees import replaced

# Larger files are not written to the directory that `LoadedCheckpoint.directory` makes of a snapshot.
SMALL_BYTES = 64 * 1024 * 1024


@dataclass(eq=False)
class LoadedCheckpoint:
    """A state whose bytes have been read and verified. It is parsed without running code from it.

    Attributes:
        label: What the state is called in messages.
        step: Its step.
        world_size: Number of ranks that wrote it.
        samples_consumed: Its data cursor, in samples drawn by all ranks.
        files: Its files that were read whole, by name, but for those that were parsed and may be parsed once.
        path: Its directory, where it has one on this machine.
        private: The tensors of `torch_object` are the reader's own. Otherwise, and those of `model_state` always, they
            must be copied before anything changes them.
        scratch: Folder for temporary files.
        spread: Its files that are spread over shards, if there are any.
        is_snapshot: It is in the memory of this node, or of several.
        rank: Number of the rank that reads it.
    """

    label: str
    _: KW_ONLY
    step: int
    world_size: int
    samples_consumed: int
    files: dict[str, memoryview]
    path: Path | None
    private: bool
    scratch: Path | None = None
    spread: SpreadFiles | None = None
    is_snapshot: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        self.files = dict(self.files)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def has(self, name: str) -> bool:
        """Return whether this file was read, and not yet parsed where it may be parsed once."""
        return name in self.files or (self.spread is not None and self.spread.has(name))

    def own_name(self, name: str) -> str:
        """Return the file that holds an object of this rank: its own, or the one of all ranks."""
        own = rank_object_name(name, self.rank)
        return own if self.has(own) else name

    @property
    def directory(self) -> Path:
        """A directory with at least the small files, for readers that need one; `close` removes it."""
        if self.path is not None:
            return self.path
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="checkpoint-snapshot-", dir=self.scratch)
            folder = Path(self._temporary.name) / f"checkpoint-{self.step}"
            folder.mkdir()
            for name, data in self.files.items():
                if len(data) <= SMALL_BYTES and name not in (*WEIGHTS_NAMES, OPTIMIZER_NAME):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(data)
        return Path(self._temporary.name) / f"checkpoint-{self.step}"

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Have any error of a parser name the file that it reads.

        Raises:
            InvalidCheckpoint: In place of any error that is not a CheckpointError.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            text = f"{type(error).__name__}: {first_line}".encode(errors="replace").decode()
            raise InvalidCheckpoint(
                self.label,
                f"{name} matches its digest but cannot be parsed ({textwrap.shorten(text, 300)}); resume from another "
                "step",
            ) from error

    def model_state(self, name: str = MODEL_NAME) -> dict[str, torch.Tensor]:
        """Return the model's state dict on the CPU, with aliases of tied weights; may be called once.

        Raises:
            InvalidCheckpoint: There is no such file, or it cannot be parsed.
            CheckpointError: The checkpoint holds a whole model where an adapter is wanted, or the other way round.
        """
        other = next((other for other in WEIGHTS_NAMES if other != name and self.has(other)), None)
        if other is not None and not self.has(name):
            raise CheckpointError(
                f"{self.label} holds {other}, this training saves {name}. Use the method that wrote it (full or an "
                "adapter), or another output_dir."
            )
        buffer = self._data(name)
        self.files.pop(name, None)
        with self.reading(name):
            state = safetensors_files.model_state(buffer)
        # Earlier releases kept the name of torch.compile's wrapper.
        return {name.removeprefix("_orig_mod."): value for name, value in state.items()}

    def cut(self, name: str, whole: torch.Tensor, live: Any, *, in_place: bool = False) -> torch.Tensor:
        """Return this rank's part of a tensor of a file; see `sharding.cut_like`.

        The tensor may have no contents yet: `SpreadFiles.cut` reads them, and raises what it says.
        """
        if self.spread is not None and self.spread.has(name):
            return self.spread.cut(name, whole, live, in_place=in_place)
        return sharding.cut_like(whole, live, in_place=in_place)

    def cut_optimizer_state(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state dict, with what this rank holds of its tensors; raises as `cut` does."""
        if self.spread is None or not self.spread.has(OPTIMIZER_NAME):
            return sharding.cut_optimizer_state(state, optimizer)
        cut = sharding.cut_optimizer_state(state, optimizer, functools.partial(self.spread.cut, OPTIMIZER_NAME))
        # What belongs to no parameter.
        self.spread.fill(OPTIMIZER_NAME, cut)
        return cut

    def torch_object(self, name: str) -> Any:
        """Return the object in a `torch.save` file; its tensors share the bytes that were read, so call this once.

        Raises:
            InvalidCheckpoint: There is no such file, or it cannot be parsed.
        """
        buffer = self._data(name)
        if name == OPTIMIZER_NAME:
            self.files.pop(name, None)
        with self.reading(name), torch.serialization.safe_globals(rng.SAFE_GLOBALS):
            check_archive(buffer)
            if len(buffer) <= SMALL_BYTES and name != OPTIMIZER_NAME:
                found = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
                return replaced(found, plain)
            # Load everything but the tensors' bytes, which takes no memory for these.
            with skip_data():
                skeleton = torch.load(io.BufferedReader(MemoryFile(buffer)), map_location="cpu", weights_only=True)
            return filled(skeleton, buffer, storage_records(io.BufferedReader(MemoryFile(buffer))))

    def own_object(self, name: str) -> Any:
        """Return `torch_object`, with tensors that are always the reader's own; call this once."""
        found = self.torch_object(name)
        # Tensors that share memory share that of the copy.
        return found if self.private else copy.deepcopy(found)

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; raises as `torch_object` does."""
        data = bytes(self._data(name))
        with self.reading(name):
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("not a JSON object")
            return found

    def _data(self, name: str) -> memoryview:
        if self.spread is not None and self.spread.has(name):
            return self.spread.open(name)
        if name not in self.files:
            raise InvalidCheckpoint(self.label, f"{name} is not in it; resume from another step")
        return self.files[name]

    def bytes_of(self, name: str) -> bytes:
        """Return a file's contents."""
        return bytes(self._data(name))

    def end_reading(self) -> None:
        """Note that model and optimizer are restored, on all ranks together: nobody reads the others' shards then."""
        if self.spread is not None:
            self.spread.end_reading()

    def close(self) -> None:
        """Release the bytes that were not parsed."""
        self.files.clear()
        if self.spread is not None:
            self.spread.close()
        if self._temporary is not None:
            self._temporary.cleanup()
