"""Whether two runs have ended in the same state: the files of their last checkpoints, bit for bit.

    python -m runner.chaos.compare '["A", null]' '["B", null]' [--tolerance T | --losses T]

Prints a JSON list of what differs. Each place is a location and a local tier. What is bound to differ is left out: the
clock's times in the Trainer's history. With a tolerance (a share of a tensor's norm), for GPUs whose kernels do not add
in the same order each time, tensors may differ by that. With `--losses`, for a run whose micro-batch was halved, only
the course of training is compared: same steps, samples and learning rates, and losses within that share. Its sums are
made in another order, and where there is dropout, other units are dropped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpointing.export import export_checkpoint
from checkpointing.manifest import MANIFEST_NAME
from checkpointing.tiers import open_tiers

TRAINER_STATE_NAME = "trainer_state.json"
_CLOCK = ("_runtime", "_per_second", "tokens_per_s")
_PLACES = ("best_model_checkpoint",)
# Of a run whose micro-batch was halved. TRL leaves tokens of an epoch's last micro-batch out of its count by how many
# samples there are beyond whole ones (accelerate's `gather_for_metrics`): with other micro-batches, others.
_EXACT = ("step", "epoch", "learning_rate")
_CLOSE = ("loss", "eval_loss", "num_tokens")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("places", nargs=2)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--losses", type=float)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-compare-") as scratch:
        folders = []
        for name, place in zip("ab", options.places, strict=True):
            location, local_tier = json.loads(place)
            tiers = open_tiers(location, local_tier)
            folder = Path(scratch) / name
            newest = tiers.catalog.find(tiers.catalog.committed_steps()[-1])
            export_checkpoint(newest.storage, newest.step, folder)
            folders.append(folder)
        if options.losses is not None:
            print(json.dumps(course_differences(folders[0], folders[1], options.losses)))
        else:
            print(json.dumps(differences(folders[0], folders[1], options.tolerance)))


def course_differences(a: Path, b: Path, tolerance: float) -> list[str]:
    """What differs in the course of two trainings, and whether the second has ended in numbers at all."""
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


def differences(a: Path, b: Path, tolerance: float | None = None) -> list[str]:
    """What differs between two checkpoints' files; each file at most once."""
    # A manifest says whose it is, and when it was made.
    names = [{path.name for path in folder.iterdir()} - {MANIFEST_NAME} for folder in (a, b)]
    found = [f"{name} is in one of the two only" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        if (a / name).read_bytes() == (b / name).read_bytes():
            continue
        if name == TRAINER_STATE_NAME:
            text = _history_difference(a / name, b / name, tolerance)
        elif name.startswith("rng_state"):
            # No tolerance, and nothing to be read from where.
            text = "the generators' states differ"
        elif name.endswith((".safetensors", ".pt", ".pth")):
            text = _difference(_load(a / name), _load(b / name), tolerance)
        elif name.endswith(".json") and tolerance is not None:
            text = _difference(json.loads((a / name).read_text()), json.loads((b / name).read_text()), tolerance)
        else:
            text = "other bytes"
        if text:
            found.append(f"{name}: {text}")
    return found


def _history_difference(a: Path, b: Path, tolerance: float | None) -> str:
    states = [_without_clock(json.loads(path.read_text())) for path in (a, b)]
    return _difference(states[0], states[1], tolerance)


def _without_clock(value: Any) -> Any:
    """Without what is measured by a clock, and without the folder's name."""
    if isinstance(value, dict):
        return {k: _without_clock(v) for k, v in value.items() if not k.endswith(_CLOCK) and k not in _PLACES}
    return [_without_clock(item) for item in value] if isinstance(value, list) else value


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True, map_location="cpu")


def _difference(a: Any, b: Any, tolerance: float | None, place: str = "") -> str:
    """Where two trees of tensors and values differ first; empty: nowhere (or not by more than the tolerance)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{place}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        if _raw(a) == _raw(b):
            return ""
        distance = float((a.double() - b.double()).norm() / max(float(a.double().norm()), 1e-12))
        if tolerance is not None and distance <= tolerance:
            return ""
        return f"{place} differs by {distance:.3g} of its norm"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{place}: other keys"
        pairs = [(str(key), a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{place}: {len(a)} and {len(b)} entries"
        pairs = [(str(index), x, y) for index, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, float) and isinstance(b, float) and tolerance is not None:
        return "" if abs(a - b) <= tolerance * max(abs(a), abs(b)) else f"{place}: {a} and {b}"
    else:
        return "" if a == b else f"{place}: {a!r} and {b!r}"
    return next(filter(None, (_difference(x, y, tolerance, f"{place}.{key}".strip(".")) for key, x, y in pairs)), "")


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
