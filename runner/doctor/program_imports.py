"""What a program imports at its top level, found in its text: nothing of it is run.

The program's own files are followed. An import within `try`, or for type checkers alone, is not needed.
"""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from runner.doctor.findings import Finding, fail, ok, warn
from runner.program.program import Program

_SUBJECT = "imports"
_MAX_FILES = 200
# Seconds for the packages of a program to load, also from a slow network file system.
_LOAD_S = 120.0
_TRIAL = """\
import importlib, sys
for name in sys.argv[1:]:
    print(name, flush=True)
    importlib.import_module(name)
"""
# In a source, what makes more modules found than are looked for here.
_CHANGES_PATH = (b"sys.path", b"addsitedir", b"meta_path")


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        name: The module, dotted; empty for `from . import name`.
        line: Its line.
        level: Dots in front of it.
        members: What is imported from it, which may be modules.
        is_certain: Whether it is run in any case.
    """

    name: str
    line: int
    level: int = 0
    members: tuple[str, ...] = ()
    is_certain: bool = True


@dataclass
class Survey:
    """What was found.

    Attributes:
        problems: What cannot be found.
        files: The program's own files, in the order in which they were read.
        packages: Names of all others that are imported for certain, and were found.
    """

    problems: list[Finding] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    packages: dict[str, None] = field(default_factory=dict)


def check_imports(program: Program) -> Iterator[Finding]:
    """Check that what a program imports can be found, as its ranks would look for it."""
    if program.file is None:
        return
    survey = _survey_of(program)
    yield from survey.problems
    if not survey.problems:
        others = f" and {len(survey.files) - 1} of its own modules import" if len(survey.files) > 1 else " imports"
        yield ok(_SUBJECT, f"all that {program.label}{others} at the top level can be found; nothing of it was run")


def try_imports_of(program: Program) -> Iterator[Finding]:
    """Import the packages that a program imports, in a process of its own; the program's own files are not run."""
    names = list(_survey_of(program).packages) if program.file is not None else []
    if not names:
        return
    command = [sys.executable, "-P", "-c", _TRIAL, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LOAD_S, check=False)
    except subprocess.TimeoutExpired as error:
        begun = error.stdout.decode(errors="replace").split() if isinstance(error.stdout, bytes) else []
        text = f"{begun[-1] if begun else names[0]} is not imported after {_LOAD_S:.0f} s"
        yield fail("trial imports", text, "try it alone: python -X importtime -c 'import …'")
        return
    if done.returncode:
        name = (done.stdout.split() or names)[-1]
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield fail("trial imports", f"import {name} failed: {why}", f"repair the package: python -c 'import {name}'")
    else:
        yield ok("trial imports", f"{', '.join(names)} can be imported")


def survey_imports(file: Path, places: Sequence[str]) -> Survey:
    """Look for what a file imports, and what its own modules import.

    Args:
        file: The program.
        places: What `sys.path` is in a rank. Modules below the first place are the program's own.
    """
    survey, waiting, own = Survey(), [file.absolute()], Path(places[0]).resolve()
    while waiting and len(survey.files) < _MAX_FILES:
        path = waiting.pop()
        if path in survey.files:
            continue
        survey.files.append(path)
        try:
            source = path.read_bytes()
            if path.suffix != ".py" and b"\0" in source:
                # Compiled, or an archive.
                continue
            # Bytes: a file may declare another encoding than UTF-8.
            imports = list(top_level_imports(ast.parse(source)))
        except (OSError, ValueError, SyntaxError, RecursionError) as error:
            survey.problems.append(fail(_SUBJECT, f"{path} cannot be read as Python: {error}", "correct the file"))
            continue
        may_be_elsewhere = any(word in source for word in _CHANGES_PATH)
        for one in imports:
            waiting += _look_for(one, path, places, own, survey, may_be_elsewhere=may_be_elsewhere)
    return survey


def top_level_imports(tree: ast.Module) -> Iterator[Import]:
    """Yield the imports that are run when a module is imported, but those that may fail or are for type checkers."""
    yield from _imports_in(tree.body, is_certain=True)


def _imports_in(body: Sequence[ast.stmt], *, is_certain: bool) -> Iterator[Import]:
    for node in body:
        match node:
            case ast.Import():
                yield from (Import(alias.name, node.lineno, is_certain=is_certain) for alias in node.names)
            case ast.ImportFrom():
                members = tuple(alias.name for alias in node.names)
                yield Import(node.module or "", node.lineno, node.level, members, is_certain)
            case ast.If() if "TYPE_CHECKING" in ast.dump(node.test):
                yield from _imports_in(node.orelse, is_certain=is_certain)
            case ast.If():
                # What is below `__name__ == "__main__"` is run.
                is_main = is_certain and "__main__" in ast.dump(node.test)
                yield from _imports_in(node.body, is_certain=is_main)
                yield from _imports_in(node.orelse, is_certain=False)
            case ast.Try() if node.handlers:
                yield from _imports_in([*node.orelse, *node.finalbody], is_certain=False)
            case ast.Try() | ast.With() | ast.ClassDef():
                yield from _imports_in(node.body, is_certain=is_certain)
            case _:
                pass


def _survey_of(program: Program) -> Survey:
    file = program.file
    assert file is not None
    # As `runner.training.user_program` runs it, and after what this process has in front.
    first = Path.cwd() if program.kind == "module" else file.absolute().parent
    return survey_imports(file, [str(first), *(sys.path if sys.flags.safe_path else sys.path[1:])])


def _look_for(
    one: Import, file: Path, places: Sequence[str], own: Path, survey: Survey, *, may_be_elsewhere: bool
) -> list[Path]:
    """Look for a module; return those of the program's own files that it leads to."""
    if one.level:
        # Which package the file is in was decided by who imports it.
        places = [str(file.parents[one.level - 1])]
    specs, missing = _find(one.name, places)
    if missing:
        where, what = f"{file.name}:{one.line}", f"no module {missing!r}"
        fix = f"install what provides it into {sys.prefix}, or correct the name"
        if one.is_certain and not may_be_elsewhere and not specs:
            survey.problems.append(fail(_SUBJECT, f"{where}: {what}", fix))
        else:
            why = "it may be made when the program runs"
            survey.problems.append(warn(_SUBJECT, f"{where}: {what} is found now; {why}", fix))
        return []
    inner = specs[-1].submodule_search_locations if specs else None
    for member in one.members:
        with contextlib.suppress(ImportError, ValueError):
            if (inner is not None or one.level) and (spec := PathFinder.find_spec(member, inner or places)) is not None:
                specs.append(spec)
    files = [Path(spec.origin) for spec in specs if spec.origin and spec.origin.endswith(".py")]
    mine = [path for path in files if _is_own(path, own)]
    root = one.name.partition(".")[0]
    if not mine and not one.level and one.is_certain and root not in sys.stdlib_module_names:
        survey.packages[one.name] = None
    return mine


def _is_own(path: Path, folder: Path) -> bool:
    # An environment may be below the working directory.
    return path.resolve().is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(path.parts)


def _find(name: str, places: Sequence[str]) -> tuple[list[ModuleSpec], str]:
    """Return the modules on the way to a dotted name, and how far it cannot be found; nothing is imported."""
    specs: list[ModuleSpec] = []
    parts, inner = name.split(".") if name else [], places
    for number, part in enumerate(parts):
        spec = _find_first(part, places) if not number else PathFinder.find_spec(part, list(inner))
        if spec is None:
            return specs, ".".join(parts[: number + 1])
        specs.append(spec)
        if spec.submodule_search_locations is None:
            # os.path, or a module that makes others: who imports it knows.
            break
        inner = spec.submodule_search_locations
    return specs, ""


def _find_first(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """Ask every finder, as an import does: an editable installation has one of its own."""
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        if find is None:
            continue
        with contextlib.suppress(ImportError, ValueError):
            spec = find(name, list(places) if finder is PathFinder else None)
            if isinstance(spec, ModuleSpec):
                return spec
    return None
