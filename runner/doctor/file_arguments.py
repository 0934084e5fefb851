"""The files and folders that a program's arguments name, as far as that can be known without running it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from runner.config.checks import is_path
from runner.doctor.findings import Finding, fail, ok, warn
from runner.doctor.machine_checks import nearest_folder
from runner.program.program import Program
from runner.session.identity import parse_arguments

# Larger ones are data.
_MAX_BYTES = 8 * 1024 * 1024
# Parts of the names of options for what the program makes by itself.
_MADE = ("output", "out_dir", "log", "save", "checkpoint", "cache", "report", "result", "export")
_SUBJECT = "arguments"
# Options of trainers, and of this library, for how many checkpoints to keep.
_KEPT = ("save_total_limit", "keep_last")


def _parse_yaml(text: str) -> None:
    """Look at the syntax alone: a program may have tags of its own."""
    for _ in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        pass


def _parse_json(text: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        # Data with one value a line often has this name, too.
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        for line in lines[:100]:
            json.loads(line)


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
    ".toml": tomllib.loads,
}
_SUFFIXES = {*_PARSERS, ".jsonl", ".parquet", ".csv", ".txt", ".arrow", ".pt", ".bin", ".safetensors", ".gz", ".zst"}


def check_arguments(program: Program) -> Iterator[Finding]:
    """Check the files and folders among a program's arguments; what it does with them is not known.

    A file of settings that cannot be read or parsed fails the check. A path that does not exist is a warning: the
    program may make it.
    """
    found, problems = 0, list[Finding]()
    for name, value in parse_arguments(program.args):
        if not isinstance(value, str) or not _names_a_file(value):
            continue
        found += 1
        problems += _check_path(f"--{name} {value}" if name is not None else value, name or "", Path(value))
    if found and not problems:
        yield ok(_SUBJECT, f"{found} path{'s' if found > 1 else ''} can be used; files of settings parse")
    yield from problems


def kept_checkpoints(program: Program) -> int | None:
    """Return how many checkpoints a program is asked to keep; None if its arguments do not say."""
    given = [value for name, value in parse_arguments(program.args) if name in _KEPT and isinstance(value, str)]
    return int(given[-1]) if given and given[-1].isdecimal() and int(given[-1]) else None


def _names_a_file(value: str) -> bool:
    if not value or "://" in value or "\n" in value or len(value) > 4096:
        return False
    return is_path(value) or Path(value).suffix.lower() in _SUFFIXES


def _check_path(said: str, name: str, path: Path) -> Iterator[Finding]:
    path = path.expanduser()
    is_made = any(part in name for part in _MADE)
    try:
        exists = path.exists()
        if is_made:
            if not os.access(nearest_folder(path), os.W_OK):
                yield warn(_SUBJECT, f"{said}: cannot be written", "correct its permissions, or choose another path")
        elif not exists:
            yield warn(_SUBJECT, f"{said}: does not exist in {Path.cwd()}", "correct it, unless the program makes it")
        elif not os.access(path, os.R_OK):
            yield fail(_SUBJECT, f"{said}: cannot be read: Permission denied", "correct its permissions")
        elif path.is_file() and path.suffix.lower() in _PARSERS and path.stat().st_size <= _MAX_BYTES:
            yield from _check_settings(said, path)
    except OSError as error:
        yield warn(_SUBJECT, f"{said}: {error.strerror}", "correct it")


def _check_settings(said: str, path: Path) -> Iterator[Finding]:
    suffix = path.suffix.lower()
    try:
        _PARSERS[suffix](path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        what = suffix[1:].upper().replace("YML", "YAML")
        why = " ".join(str(error).split()).replace("\0", " ")
        yield fail(_SUBJECT, f"{said}: is not {what}: {why[:200]}", "correct the file")
