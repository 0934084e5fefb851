"""Every trainer of the installed TRL has a case, or a reason why it has none; so that a new release is noticed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import warnings
from pathlib import Path
from typing import Any

import pytest

# Trainers that no case can run, by module and class.
NOT_HERE = {
    "trl.trainer.base_trainer._BaseTrainer": "the base class of the others",
    "trl.experimental.distillation.DistillationTrainer": "a deprecated name of trl.DistillationTrainer",
    "trl.experimental.kto.KTOTrainer": "a deprecated name of trl.KTOTrainer",
    "trl.experimental.async_distillation.async_distillation_trainer.AsyncDistillationTrainer": (
        "asks vLLM servers for completions and for the teacher's opinion, and trains on whatever comes first"
    ),
    "trl.experimental.async_grpo.async_grpo_trainer.AsyncGRPOTrainer": (
        "asks a vLLM server for completions, and trains on whatever comes first"
    ),
    "trl.experimental.server_distillation.server_distillation_trainer.ServerDistillationTrainer": (
        "asks a vLLM server for the teacher's opinion"
    ),
}
_PACKAGES = ("trl.trainer", "trl.experimental")


def _trainers() -> tuple[dict[str, Any], dict[str, str]]:
    """Trainers by module and class, None where the module cannot be imported; and why modules cannot be imported."""
    from transformers import Trainer

    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for package in _PACKAGES:
        path = importlib.import_module(package).__path__
        names = [package, *(info.name for info in pkgutil.walk_packages(path, package + ".", lambda name: None))]
        for name in names:
            try:
                module = importlib.import_module(name)
            except Exception as error:  # whatever a package needs that is not here
                errors[name] = f"{type(error).__name__}: {error}"
                found |= dict.fromkeys(_trainers_in_source(name))
                continue
            for cls in vars(module).values():
                if isinstance(cls, type) and issubclass(cls, Trainer) and cls.__module__ == name:
                    found[f"{name}.{cls.__name__}"] = cls
    return found, errors


def _trainers_in_source(module: str) -> list[str]:
    """Classes that are derived from one that is called a trainer."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return []
    return [
        f"{module}.{node.name}"
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Trainer") for base in node.bases)
    ]


def _in_cases() -> list[Any]:
    """What the modules with the cases import from TRL."""
    nodes = [
        node
        for path in Path(__file__).parent.glob("cases_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl"
    ]
    return [getattr(importlib.import_module(str(node.module)), name.name) for node in nodes for name in node.names]


def test_every_trainer_of_trl_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainers, errors = _trainers()
        cases = _in_cases()
    print(*(f"cannot be imported: {name}: {why}" for name, why in errors.items()), sep="\n")
    assert len(trainers) > len(NOT_HERE), "TRL's trainers are not where they were"
    missing = {name for name, cls in trainers.items() if cls is None or cls not in cases}
    assert sorted(missing - NOT_HERE.keys()) == [], "write a case for them, or add them to NOT_HERE with the reason"
    assert sorted(NOT_HERE.keys() - missing) == [], "NOT_HERE has what is gone, or has a case by now"
