"""Compare the files of two runs' last checkpoints, bit for bit.

    python -m runner.chaos.compare '["A", null]' '["B", null]' [--tolerance T | --losses T]

Prints a JSON list of differences. Each argument is a location and a local tier. Clock times in the Trainer's history
are ignored, as they always differ. With a tolerance (a share of a tensor's norm), for GPUs whose kernels add in any
order, tensors may differ by that share. With `--losses`, for a run whose micro-batch was halved, only the course of
training is compared: same steps, samples and learning rates, and losses within that share. Halving changes the order of
sums and the dropout masks. With `--any-ranks`, for virtual ranks, what does not depend on the number of ranks is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpointing.commit.export import export_checkpoint
from checkpointing.commit.tiers import open_tiers
from checkpointing.files.differences import CLOCK
from checkpointing.format.layout import PER_RANK_PREFIXES, STEP_RECORD_PREFIX
from checkpointing.format.manifest import MANIFEST_NAME
from checkpointing.format.step_record import first_difference

TRAINER_STATE_NAME = "trainer_state.json"
_PATHS = ("best_model_checkpoint",)
# For a run whose micro-batch was halved. The number of tokens is only close: accelerate's `gather_for_metrics` drops
# samples of an epoch's last, incomplete micro-batch, and how many depends on the micro-batch.
_EXACT = ("step", "epoch", "learning_rate")
# A sum over ranks that is kept in single precision.
_SUMS = ("total_flos",)
_FIRST_RANK = ("rng_state_0.pth", "rng_state.pth")
_CLOSE = ("loss", "eval_loss", "num_tokens")


def main() -> None:
    """Compare the checkpoints that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("locations", nargs=2)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--losses", type=float)
    parser.add_argument("--any-ranks", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-compare-") as scratch:
        folders = []
        for name, argument in zip("ab", options.locations, strict=True):
            location, local_tier = json.loads(argument)
            tiers = open_tiers(location, local_tier)
            folder = Path(scratch) / name
            newest = tiers.catalog.find(tiers.catalog.committed_steps()[-1])
            export_checkpoint(newest.storage, newest.step, folder)
            folders.append(folder)
        if options.losses is not None:
            print(json.dumps(course_differences(folders[0], folders[1], options.losses)))
        else:
            found = differences(folders[0], folders[1], options.tolerance, any_ranks=options.any_ranks)
            print(json.dumps(found))


def course_differences(a: Path, b: Path, tolerance: float) -> list[str]:
    """Return what differs in the course of two runs: steps, learning rates, and losses by more than this share.

    The weights of the second checkpoint must be finite.
    """
    histories = [json.loads((folder / TRAINER_STATE_NAME).read_text())["log_history"] for folder in (a, b)]
    text = ""
    for names, allowed in ((_EXACT, None), (_CLOSE, tolerance)):
        a_course, b_course = ([_only(names, entry) for entry in history] for history in histories)
        text = text or _difference(a_course, b_course, allowed)
    found = [f"{TRAINER_STATE_NAME}: log_history.{text}"] if text else []
    for path in sorted(b.glob("*.safetensors")):
        bad = [name for name, tensor in _load(path).items() if not bool(torch.isfinite(tensor).all())]
        found += [f"{path.name}: {bad[0]} is not finite"] if bad else []
    return found


def _only(names: Sequence[str], entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in names if name in entry}


def differences(a: Path, b: Path, tolerance: float | None = None, *, any_ranks: bool = False) -> list[str]:
    """Return what differs in the files of two checkpoints, once per file.

    Args:
        a: Folder of the first checkpoint.
        b: Folder of the second checkpoint.
        tolerance: Share of a tensor's norm by which it may differ; None for bit-identical.
        any_ranks: The two may have ended on different numbers of ranks, with virtual ranks: of what there is of each
            rank, only the first one's generator is compared.
    """
    # A manifest contains the run's name and the time of the save, which differ.
    left_out = (MANIFEST_NAME, *(PER_RANK_PREFIXES if any_ranks else ()))
    names = [{path.name for path in folder.iterdir() if not path.name.startswith(left_out)} for folder in (a, b)]
    found = [f"{name} is in one of the two only" for name in sorted(names[0] ^ names[1])]
    if any_ranks and not _equal_generators(a, b):
        found.append("torch's generator of the first rank differs")
    for name in sorted(names[0] & names[1]):
        if (a / name).read_bytes() == (b / name).read_bytes():
            continue
        if name == TRAINER_STATE_NAME:
            text = _history_difference(a / name, b / name, tolerance, _SUMS if any_ranks else ())
        elif name.startswith("rng_state"):
            # The states of generators are opaque: there is neither a tolerance nor a position to name.
            text = "the generators' states differ"
        elif name.endswith((".safetensors", ".pt", ".pth")):
            text = _difference(_load(a / name), _load(b / name), tolerance)
        elif name.startswith(STEP_RECORD_PREFIX):
            text = record_difference((a / name).read_bytes(), (b / name).read_bytes(), tolerance)
        elif name.endswith(".json") and tolerance is not None:
            text = _difference(json.loads((a / name).read_text()), json.loads((b / name).read_text()), tolerance)
        else:
            text = "other bytes"
        if text:
            found.append(f"{name}: {text}")
    return found


def record_difference(a: bytes, b: bytes, tolerance: float | None = None) -> str:
    """Return which step of two step records differs first, and what; with a tolerance only its batch counts."""
    found = first_difference(a, b)
    if found is None or (tolerance is not None and "batch" not in found[1]):
        return ""
    return f"step {found[0]} differs: {', '.join(found[1])}"


def _equal_generators(a: Path, b: Path) -> bool:
    from checkpointing.process.rng import SAFE_GLOBALS

    states = [next((path for path in map(folder.joinpath, _FIRST_RANK) if path.is_file()), None) for folder in (a, b)]
    if states[0] is None or states[1] is None:
        return False
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        first, second = (torch.load(path, weights_only=True)["cpu"] for path in states if path is not None)
    return bool(torch.equal(first, second))


def _history_difference(a: Path, b: Path, tolerance: float | None, left_out: tuple[str, ...]) -> str:
    states = [_without(left_out + _PATHS, json.loads(path.read_text())) for path in (a, b)]
    return _difference(states[0], states[1], tolerance)


def _without(names: tuple[str, ...], value: Any) -> Any:
    """Return the value without these entries, and without clock times."""
    if isinstance(value, dict):
        return {k: _without(names, v) for k, v in value.items() if not k.endswith(CLOCK) and k not in names}
    return [_without(names, item) for item in value] if isinstance(value, list) else value


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True, map_location="cpu")


def _difference(a: Any, b: Any, tolerance: float | None, path: str = "") -> str:
    """Describe the first difference of two trees of tensors and values; empty if there is none beyond the tolerance."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{path}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        if _raw(a) == _raw(b):
            return ""
        distance = float((a.double() - b.double()).norm() / max(float(a.double().norm()), 1e-12))
        if tolerance is not None and distance <= tolerance:
            return ""
        return f"{path} differs by {distance:.3g} of its norm"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{path}: other keys"
        pairs = [(str(key), a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} entries"
        pairs = [(str(index), x, y) for index, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, float) and isinstance(b, float) and tolerance is not None:
        return "" if abs(a - b) <= tolerance * max(abs(a), abs(b)) else f"{path}: {a} and {b}"
    else:
        return "" if a == b else f"{path}: {a!r} and {b!r}"
    return next(filter(None, (_difference(x, y, tolerance, f"{path}.{key}".strip(".")) for key, x, y in pairs)), "")


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
