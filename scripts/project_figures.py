"""Figures of the code's shape: seams and tests, each with the bar that the project holds itself to.

`scripts/figures` prints them. A figure is counted on the syntax tree of the product's files, which are not imported;
only the probe of a new failure class runs code, in a temporary copy.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("runner", "checkpointing")
CHECK_BAR_S = 60.0
TEST_BAR_S = 900.0
_CONTRACT = "tests/contract runs every back end through one suite"
# Modules without a unit test, and why.
WITHOUT_UNIT_TEST = {
    "checkpointing.storage.base": _CONTRACT,
    "checkpointing.storage.fsspec_store": _CONTRACT,
    "checkpointing.storage.local": _CONTRACT,
    "checkpointing.storage.object_store": "a protocol and its errors",
    "checkpointing.storage.s3": _CONTRACT,
}
_EVENT_MODULES = ("checkpointing/agent/events.py", "runner/journal/events.py")
# Calls whose first argument may name an event.
_EVENT_CALLS = {"all", "append", "emit", "publish", "record", "report"}
_RETENTION_OPTION = {"keep_every", "keep_every_steps"}
_STORAGE = "checkpointing/storage/"


@dataclass(frozen=True)
class Figure:
    """A counted figure.

    Attributes:
        name: What is counted.
        value: The count, or seconds.
        bar: The most that is allowed.
        found: What was counted, for people.
        note: How the count is to be read.
    """

    name: str
    value: float
    bar: float
    found: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def passes(self) -> bool:
        return self.value <= self.bar


@dataclass(frozen=True)
class Source:
    """A product file.

    Attributes:
        path: Relative to the repository, with slashes.
        tree: Its syntax tree.
    """

    path: str
    tree: ast.Module

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


def sources(root: Path) -> list[Source]:
    """Read all Python files of the product."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path.relative_to(root).as_posix(), ast.parse(text)))
    return found


# -- tests ---------------------------------------------------------------------------------------------------------


def untested_modules(root: Path, files: Iterable[Source]) -> Figure:
    """Count modules that neither have a mirror in tests/unit nor are imported by name in a unit test."""
    tests = sorted((root / "tests" / "unit").rglob("*.py"))
    mirrors = {path.relative_to(root / "tests" / "unit").as_posix() for path in tests}
    imported = {name for path in tests for name in _imported(ast.parse(path.read_text(encoding="utf-8")))}
    found = []
    for file in files:
        folder, _, name = file.path.rpartition("/")
        is_trivial = name in ("__init__.py", "__main__.py")
        if is_trivial or file.module in WITHOUT_UNIT_TEST or file.module in imported:
            continue
        if f"{folder}/test_{name}" not in mirrors:
            found.append(file.module)
    return Figure(
        "modules of the core without a unit test",
        len(found),
        0,
        found,
        "a unit test mirrors the module, or imports it by name; __init__ and __main__ do not count",
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports, and what may be modules among the names it imports from packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# -- seams ---------------------------------------------------------------------------------------------------------


def storage_type_checks(files: Iterable[Source]) -> Figure:
    """Count calls of `isinstance` with a class of checkpointing.storage outside that package; errors do not count."""
    files = list(files)
    in_storage = [file for file in files if file.path.startswith(_STORAGE)]
    classes = {node.name for file in in_storage for node in file.tree.body if isinstance(node, ast.ClassDef)}
    back_ends = {name for name in classes if name.endswith(("Storage", "Store"))}
    found = []
    for file in files:
        if file in in_storage:
            continue
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                names |= {name.attr for name in ast.walk(node.args[1]) if isinstance(name, ast.Attribute)}
                found += [f"{file.path}:{node.lineno}: {name}" for name in sorted(names & back_ends)]
    return Figure("isinstance of a storage back end outside checkpointing/storage", len(found), 0, found)


def event_name_strings(files: Iterable[Source]) -> Figure:
    """Count strings that name an event outside the two modules that define events.

    A string counts in a dict under the key `event`, in a comparison or a match with something indexed by `event`, and
    as the first argument of a call such as `report("committed")`.
    """
    files = list(files)
    names = {name for file in files if file.path in _EVENT_MODULES for name in _defined_events(file.tree)}
    found = [
        f"{file.path}:{line}: {name!r}"
        for file in files
        if file.path not in _EVENT_MODULES
        for line, name in sorted(set(_event_strings(file.tree)))
        if name in names
    ]
    return Figure("string event names outside the events modules", len(found), 0, found)


def _defined_events(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for keyword in node.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def _event_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from _strings(value for key, value in pairs if _is_text(key, "event"))
        elif isinstance(node, ast.Compare) and any(map(_is_event_name, (node.left, *node.comparators))):
            yield from _strings((node.left, *node.comparators))
        elif isinstance(node, ast.Match) and _is_event_name(node.subject):
            yield from _strings(case.pattern for case in node.cases)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _EVENT_CALLS:
            yield from _strings(node.args[:1])


def _strings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def _is_event_name(node: ast.AST) -> bool:
    """Whether an expression is `something["event"]` or `something.get("event")`."""
    if isinstance(node, ast.Subscript):
        return _is_text(node.slice, "event")
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and bool(node.args)
        and _is_text(node.args[0], "event")
    )


def _is_text(node: ast.AST | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


# -- files to touch ------------------------------------------------------------------------------------------------


def retention_option_files(files: Iterable[Source]) -> Figure:
    """Count the files that name an existing retention option: one like it would have to be added to each of them."""
    found = [file.path for file in files if _RETENTION_OPTION & set(_identifiers(file.tree))]
    note = f"product files that name {' or '.join(sorted(_RETENTION_OPTION))}"
    return Figure("files to touch for a retention option", len(found), 2, found, note)


def _identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(name)):
                yield name


def storage_back_end_files(files: Iterable[Source]) -> Figure:
    """Count the registry of back ends, and the files outside that ask for the type of one."""
    others = sorted({place.split(":")[0] for place in storage_type_checks(files).found})
    registry = f"{_STORAGE}__init__.py"
    note = "besides the back end's own file: the registry, and the files that ask for a back end's type"
    return Figure("files to touch for a storage back end", 1 + len(others), 1, [registry, *others], note)


_NEW_CLASS = """\
    PROBE = Rule(
        "probe failure",
        known_by="`ProbeError`",
        response="end the run",
        action=Action.GIVE_UP,
        exit_code=ExitCode.DETERMINISTIC,
        error=re.compile(r"^ProbeError"),
        examples=("ProbeError: no luck",),
    )
"""
# Recognition, decision, and what journal readers think of the new class.
_PROBE = """
from runner.errors import ExitCode
from runner.journal.ledger import is_failure
from runner.recovery.classify import RankEnd, classify
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.recovery.policy import AttemptRecord, decide
failure = classify([RankEnd(0, 0, 1, "ProbeError: no luck")], finished=False, started_step=0, step=5)
assert failure.kind is FailureKind.PROBE, failure
decision = decide([AttemptRecord(failure, 0)], max_restarts=5, stop_requested=False)
assert decision.exit_code is ExitCode.DETERMINISTIC, decision
assert Failure.from_dict(failure.to_dict()) == failure and is_failure("probe failure")
"""


def failure_class_files(root: Path) -> Figure:
    """Add a failure class to the table in a temporary copy, and see whether nothing else has to be touched.

    The copy must classify it, decide by it and read it back from a journal, and its unit tests of `recovery` must pass.
    """
    table = "runner/recovery/kinds.py"
    name, note = "files to touch for a failure class", "product files, besides generated documentation; by a probe"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for package in (*PACKAGES, "tests"):
            shutil.copytree(root / package, copy / package, ignore=shutil.ignore_patterns("__pycache__", "data"))
        shutil.copy(root / "pyproject.toml", copy)
        text = (copy / table).read_text(encoding="utf-8")
        first = text.find("    NO_VALID_CHECKPOINT = Rule(")
        (copy / table).write_text(text[:first] + _NEW_CLASS + text[first:], encoding="utf-8")
        tests = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/unit/runner/recovery"]
        for command in (["-c", _PROBE], tests):
            environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(
                [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, timeout=300
            )
            if done.returncode != 0:
                reason = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
                return Figure(name, 2, 1, [table, f"and more, because the probe failed: {reason}"], note)
    return Figure(name, 1, 1, [table], note)


# -- times ---------------------------------------------------------------------------------------------------------


def duration(root: Path, script: str, bar_s: float) -> Figure:
    """Run one of the project's scripts, which must succeed."""
    began = time.monotonic()
    done = subprocess.run([str(root / "scripts" / script)], cwd=root)
    seconds = time.monotonic() - began
    found = [] if done.returncode == 0 else [f"failed with exit code {done.returncode}"]
    return Figure(f"scripts/{script}, s", seconds if done.returncode == 0 else float("inf"), bar_s, found)


# -- all of them ---------------------------------------------------------------------------------------------------


def counted(root: Path) -> list[Figure]:
    """Return the figures that need no more than reading the code."""
    files = sources(root)
    return [
        untested_modules(root, files),
        retention_option_files(files),
        storage_back_end_files(files),
        storage_type_checks(files),
        event_name_strings(files),
    ]


def figures(root: Path, *, probed: bool, timed: Mapping[str, float]) -> Iterator[Figure]:
    """Yield the counted figures, those that a probe finds, and durations.

    Args:
        root: Of the repository.
        probed: Whether copies of the code are probed.
        timed: Scripts to run, with their bars in seconds.
    """
    yield from counted(root)
    if probed:
        yield failure_class_files(root)
    for script, bar_s in timed.items():
        yield duration(root, script, bar_s)


def table_of(found: Iterable[Figure]) -> str:
    """Return a Markdown table."""
    lines = ["| figure | value | bar | |", "|---|---|---|---|"]
    for figure in found:
        verdict = "pass" if figure.passes else "MISS"
        lines.append(f"| {figure.name} | {figure.value:.4g} | ≤ {figure.bar:g} | {verdict} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; return 1 if a figure misses its bar."""
    bars_s = {"check": CHECK_BAR_S, "test": TEST_BAR_S}
    parser = argparse.ArgumentParser(
        prog="scripts/figures",
        description="Print figures of the code's shape with their bars. Exits with 1 if a figure misses its bar.",
    )
    parser.add_argument("--list", action="store_true", help="print what each figure counts")
    parser.add_argument("--counted", action="store_true", help="only what is found by reading the code")
    parser.add_argument(
        "--time",
        nargs="?",
        const="check,test",
        default="",
        metavar="SCRIPTS",
        help="also run these scripts and print their seconds (default: check,test)",
    )
    options = parser.parse_args()
    scripts = [name for name in options.time.split(",") if name]
    if unknown := set(scripts) - set(bars_s):
        parser.error(f"unknown script {', '.join(sorted(unknown))}; choose from {', '.join(bars_s)}")
    timed = {name: bars_s[name] for name in scripts}
    found = list(figures(Path(__file__).resolve().parents[1], probed=not options.counted, timed=timed))
    print(table_of(found))
    if options.list:
        for figure in found:
            if figure.found:
                print(f"\n{figure.name}" + (f" ({figure.note})" if figure.note else ""))
                print("\n".join(f"  {item}" for item in figure.found))
    return 0 if all(figure.passes for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
