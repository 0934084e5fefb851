"""What changed between two checkpoints, and by how much: tensors, optimizer, scheduler, the trainer's state.

    python -m checkpointing.files.differences FOLDER_A FOLDER_B [--without NAME]... [--json]

Prints the differences of the files in two folders, one a line, and exits with 3 if there are any. Files are mapped, and
tensors are compared in pieces, so memory does not grow with the checkpoint. Nothing in a file is executed.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import re
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.commit.reading import read_shared
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.safetensors_files import mapped_state
from checkpointing.format.manifest import MANIFEST_NAME

# Exit code; that of an uncaught exception is 1.
DIFFERENT = 3
# Parts of the names of a Trainer's figures that depend on the clock alone.
CLOCK = ("_runtime", "_per_second", "tokens_per_s")
# In a checkpoint of several files of weights; they are compared as one.
_PART_OF_WEIGHTS = re.compile(r"(.+)-\d{5}-of-\d{5}(\.safetensors)")
_WEIGHTS_INDEX = ".safetensors.index.json"
# Elements that are compared at a time: of a few megabytes in double precision.
_PIECE = 1 << 18
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# In bytes.
_WIDEST = 8
_SMALLEST = float(np.finfo(np.float64).tiny)
_LONGEST_VALUE = 80
_GENERATORS = "rng_state"


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        file: The file.
        name: The tensor or the value inside it; empty for the whole file.
        kind: `added`, `removed`, `type`, `shape`, `values` of a tensor, `value` of anything else, or `bytes`.
        a: What the first checkpoint has, as text.
        b: What the second one has.
        num_different: Number of elements whose bits differ.
        num_elements: Number of elements.
        num_not_finite: Of those that differ, how many are NaN or infinite in one of the two; not in what follows.
        max_abs: The largest difference of two elements.
        max_rel: The largest difference of two elements, as a share of the larger one's magnitude.
        norm_rel: The norm of the difference, as a share of the norm of the first tensor; None where that is zero.
    """

    file: str
    name: str
    kind: str
    a: str | None = None
    b: str | None = None
    num_different: int | None = None
    num_elements: int | None = None
    num_not_finite: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    norm_rel: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what there is to say, without what does not apply; what JSON has no number for is a text."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        odd = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        return values | {name: str(values[name]) for name in odd}

    def __str__(self) -> str:
        where = f"{self.file}: {self.name}" if self.name else self.file
        if self.kind in ("added", "removed"):
            what = self.kind
        elif self.kind == "values":
            return f"{where}: {self._amount}"
        else:
            what = f"other {self.kind}"
        texts = " and ".join(text for text in (self.a, self.b) if text is not None)
        amount = f"; {self._amount}" if self.num_different else ""
        return f"{where}: {what}" + (f" ({texts})" if texts else "") + amount

    @property
    def _amount(self) -> str:
        share = "" if self.norm_rel is None else f", {self.norm_rel:.3g} of its norm"
        odd = f" ({self.num_not_finite} of them not finite)" if self.num_not_finite else ""
        return (
            f"{self.num_different} of {self.num_elements} elements differ{odd}, by {self.max_abs:.3g} at most "
            f"(relative {self.max_rel:.3g}){share}"
        )


def differences(a: Path, b: Path, without: frozenset[str] = frozenset()) -> Iterator[Difference]:
    """Yield what differs between the files of two checkpoints.

    Figures of a Trainer that depend on the clock alone are left out.

    Args:
        a: Folder of the first.
        b: Folder of the second.
        without: Names of files to leave out.

    Raises:
        InvalidCheckpoint: A file cannot be parsed.
    """
    names, others = (_files(folder, without) for folder in (a, b))
    for name in sorted({*names, *others}):
        if name not in others or name not in names:
            yield Difference(name, "", "removed" if name in names else "added")
        else:
            yield from _of_files(name, names[name], others[name])


def _files(folder: Path, without: frozenset[str]) -> dict[str, list[Path]]:
    """Return the files by name; those that hold parts of the weights by the name of the whole."""
    found: dict[str, list[Path]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == MANIFEST_NAME or name in without or name.endswith(_WEIGHTS_INDEX):
            continue
        part = _PART_OF_WEIGHTS.fullmatch(name)
        found.setdefault(part[1] + part[2] if part else name, []).append(path)
    return found


def _of_files(name: str, a: list[Path], b: list[Path]) -> Iterator[Difference]:
    kind = Path(name).suffix
    if kind == ".safetensors":
        yield from _of_trees(name, "", _parsed(a, mapped_state), _parsed(b, mapped_state))
    elif filecmp.cmp(a[0], b[0], shallow=False):
        return
    # What a generator's state differs by says nothing.
    elif kind in (".pt", ".pth") and not name.startswith(_GENERATORS):
        yield from _of_trees(name, "", _parsed(a, _torch_object), _parsed(b, _torch_object))
    elif kind == ".json":
        yield from _of_trees(name, "", *(_without_clock(_parsed(paths, _json)) for paths in (a, b)))
    else:
        yield Difference(name, "", "bytes")


def _parsed(paths: list[Path], parse: Callable[[list[Path]], Any]) -> Any:
    try:
        return parse(paths)
    except CheckpointError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise InvalidCheckpoint(str(paths[0]), f"it cannot be parsed ({type(error).__name__}: {text})") from error


def _torch_object(paths: list[Path]) -> Any:
    [path] = paths
    files = {path.name: read_shared(path, algorithm=None)[0]}
    loaded = LoadedCheckpoint(
        str(path.parent), step=0, world_size=1, samples_consumed=0, files=files, path=path.parent, private=True
    )
    return loaded.torch_object(path.name)


def _json(paths: list[Path]) -> Any:
    return json.loads(paths[0].read_bytes())


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_clock(entry) for name, entry in value.items() if not name.endswith(CLOCK)}
    return [_without_clock(entry) for entry in value] if isinstance(value, list) else value


def _of_trees(file: str, name: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype and a.dtype.kind in "biufc":
        a, b = torch.from_numpy(a), torch.from_numpy(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        yield from _of_tensors(file, name, a, b)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _of_entries(file, name, dict(a), dict(b))
    elif isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        yield from _of_entries(file, name, dict(enumerate(a)), dict(enumerate(b)))
    elif type(a) is not type(b) or not _equal(a, b):
        yield Difference(file, name, "value", _text(a), _text(b))


def _of_entries(file: str, name: str, a: dict[Any, Any], b: dict[Any, Any]) -> Iterator[Difference]:
    for key in [*a, *(key for key in b if key not in a)]:
        below = f"{name}.{key}" if name else str(key)
        if key not in b:
            yield Difference(file, below, "removed", a=_text(a[key]))
        elif key not in a:
            yield Difference(file, below, "added", b=_text(b[key]))
        else:
            yield from _of_trees(file, below, a[key], b[key])


def _of_tensors(file: str, name: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[Difference]:
    if a.shape != b.shape:
        yield Difference(file, name, "shape", _text(a), _text(b))
    elif a.dtype != b.dtype:
        # How much the values differ is what a change of precision costs.
        yield replace(_of_values(file, name, a, b), kind="type", a=_text(a), b=_text(b))
    else:
        found = _of_values(file, name, a, b)
        if found.num_different:
            yield found


def _of_values(file: str, name: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Return how much two tensors of one shape differ, in memory for one piece of each."""
    different = not_finite = 0
    max_abs = max_rel = squares = norm = 0.0
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, len(flat_a), _PIECE):
        x, y = flat_a[start : start + _PIECE], flat_b[start : start + _PIECE]
        unequal = _other_bits(x, y)
        values_x, values_y = _values(x), _values(y)
        norm += float(values_x[values_x.isfinite()].square().sum())
        different += int(unequal.sum())
        if not unequal.any():
            continue
        values_x, values_y = values_x[unequal], values_y[unequal]
        finite = values_x.isfinite() & values_y.isfinite()
        not_finite += int((~finite).sum())
        gaps = (values_x - values_y)[finite].abs()
        larger = torch.maximum(values_x.abs(), values_y.abs())[finite]
        if len(gaps):
            max_abs = max(max_abs, float(gaps.max()))
            max_rel = max(max_rel, float((gaps / larger.clamp_min(_SMALLEST)).max()))
            squares += float(gaps.square().sum())
    norm_rel = math.sqrt(squares / norm) if norm else None
    return Difference(
        file, name, "values", None, None, different, len(flat_a), not_finite or None, max_abs, max_rel, norm_rel
    )


def _other_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return which elements differ in a bit; NaN equals NaN."""
    if x.dtype != y.dtype:
        values = [_values(part) for part in (x, y)]
        return (values[0] != values[1]) & ~(values[0].isnan() & values[1].isnan())
    words, width = (x, y), x.element_size()
    if width > _WIDEST:
        pairs = [part.contiguous().view(torch.int64).view(-1, width // _WIDEST) for part in words]
        return (pairs[0] != pairs[1]).any(1)
    whole = [part.contiguous().view(_INTEGERS[width]) for part in words]
    return whole[0] != whole[1]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in double precision; of complex ones the magnitude."""
    return tensor.abs().double() if tensor.is_complex() else tensor.double()


def _equal(a: Any, b: Any) -> bool:
    return bool(np.all(a == b)) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (Mapping, list, tuple, deque)):
        return f"{len(value)} entries"
    return textwrap.shorten(str(value), _LONGEST_VALUE)


def main() -> None:
    """Print the differences of two folders, one a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs=2, type=Path)
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    a, b = options.folders
    differ = False
    try:
        for difference in differences(a, b, frozenset(options.without)):
            differ = True
            print(json.dumps(difference.to_json()) if options.json else difference, flush=True)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(DIFFERENT if differ else 0)


if __name__ == "__main__":
    main()
