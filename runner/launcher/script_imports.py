"""What a user's script will import, so that ranks are forked from a process that has loaded it, and no more.

Loading transformers takes four seconds of processor time and TRL another one, which a bare loop need not wait for. Only
what can be read in the script's text counts: where that leaves a doubt, everything is loaded.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# Names of packages that import neither transformers nor trl, besides the standard library.
_LIGHT = {"torch", "numpy", "tqdm", "yaml", "psutil", "safetensors", "torchvision", "pandas", "pyarrow", "rich"}
_HEAVY = {"transformers", "datasets", "accelerate", "tokenizers"}
# Ways to import what the text does not name.
_HIDDEN = ("import_module", "__import__", "exec(", "runpy")
_MAX_FILES = 100

# accelerate imports it when training begins.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
EVERYTHING = ("transformers.trainer", "datasets", "trl.trainer.sft_trainer", "runner.training.job", _HOOKS)
_OF_TRAINER = ("transformers.trainer", "datasets", "checkpointing.transformers", _HOOKS)
_OF_LOOP = ("checkpointing.manager.manager",)


def modules_to_preload(script: str | None) -> tuple[str, ...]:
    """Return the modules to load before ranks are forked.

    Args:
        script: Path of the user's script; None for the bundled job.
    """
    if script is None:
        return EVERYTHING
    try:
        found = set(_imported(Path(script)))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return EVERYTHING
    packages = {name.partition(".")[0] for name in found} - sys.stdlib_module_names - _LIGHT - {"checkpointing"}
    if not packages <= _HEAVY:
        return EVERYTHING
    return _OF_TRAINER if packages or "checkpointing.transformers" in found else _OF_LOOP


def _imported(script: Path) -> Iterator[str]:
    """Yield the names of the modules that a script, and the files in its folder that it imports, import.

    Raises:
        OSError: A file cannot be read.
        ValueError: Something may be imported that the text does not name.
        SyntaxError: A file is not Python.
    """
    waiting, seen = [script], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        if len(seen) > _MAX_FILES or any(word in text for word in _HIDDEN):
            raise ValueError("imports that the text does not show")
        for name in _names(ast.parse(text)):
            local = _local_files(script.parent, name)
            if local:
                waiting += local
            else:
                yield name


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError("a relative import, which depends on how the file was imported")
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _local_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a module in the script's folder, with those of the packages around it."""
    parts = name.split(".")
    found: list[Path] = []
    for count in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:count])
        found += [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found
