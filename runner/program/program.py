"""A user's program, found from its command line without importing any of it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from runner.errors import UsageError

# Interpreters that may stand in front of a program.
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Interpreter options without a value.
_PYTHON_FLAGS = {"-u", "-B", "-O", "-OO", "-s", "-S", "-E", "-I", "-P", "-q"}
_HEAD_BYTES = 400
# Long paths of an interpreter are in the second line: #!/bin/sh, then '''exec' "/path/python" "$0" "$@".
_EXECUTED = re.compile(r"^'''exec' \"?([^\"]+?)\"? \"\$0\"", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """What each rank runs as `__main__`.

    Attributes:
        kind: `script` is a Python file, `module` what `python -m` runs, and `command` the file of a command that a
            Python package has installed.
        name: Path of the file, or name of the module.
        args: Its arguments.
    """

    kind: Literal["script", "module", "command"]
    name: str
    args: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What the program is called where people read of it, the same on every machine."""
        return self.name if self.kind == "module" else Path(self.name).name

    @property
    def stem(self) -> str:
        """A name for the folder of its runs."""
        return Path(self.name).stem if self.kind == "script" else self.label.replace(".", "-")

    @property
    def file(self) -> Path | None:
        """The file that is run, where the program is the user's own and not a command; None if it is not found."""
        if self.kind == "module":
            return _file_of_module(self.name)
        return Path(self.name) if self.kind == "script" else None

    def from_anywhere(self) -> Program:
        """Return the program with a path that any working directory finds."""
        return self if self.kind == "module" else replace(self, name=os.path.abspath(self.name))  # noqa: PTH100

    @property
    def as_typed(self) -> list[str]:
        """The arguments of `runner start` that name the program."""
        return [*(["-m"] if self.kind == "module" else []), self.name, *self.args]

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` parses."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Program:
        """Parse what `to_json` returned."""
        return cls(found["kind"], found["name"], tuple(found["args"]))


def find_program(
    word: str | None, args: Sequence[str], *, module: bool = False, command: bool = False
) -> Program | None:
    """Return the program of a command line.

    Args:
        word: A Python file, `python`, a command of a Python package, or the name of a module.
        args: What follows it.
        module: Whether `word` is a module, as with `python -m`.
        command: Whether `word` is a command, also where a file has its name.

    Returns:
        None if there is no word.

    Raises:
        UsageError: There is no such program, or it is no Python.
    """
    if word is None:
        if module:
            raise UsageError("-m needs the name of a module: runner start -m package.module [args]")
        return None
    if module:
        return _module(word, args)
    if _PYTHON.fullmatch(Path(word).name) and Path(word).suffix != ".py":
        return _after_python(args)
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        raise UsageError(f"{word!r} is no program; pass a configuration file as --config {word}")
    if path.is_file() and _is_installed(path):
        return _command(word, path, args)
    if path.is_file() and not command:
        if path.suffix != ".py" and (reader := _other_interpreter(path)):
            raise UsageError(
                f"{word!r} is no Python program ({reader}); pass the Python file that it starts in the end"
            )
        return Program("script", word, tuple(args))
    if os.sep not in word and path.suffix != ".py" and (found := _which(word)) is not None:
        return _command(word, found, args)
    raise UsageError(
        f"script {word!r} does not exist; pass the path of a Python file, -m MODULE, or a command of a Python package"
    )


def check_syntax(program: Program) -> None:
    """Refuse a program that Python cannot compile, which would be found once everything has started; UsageError.

    The text is the one that Python itself shows. What the program imports is not looked at.
    """
    file = program.file
    try:
        source = file.read_bytes() if file is not None and file.is_file() else b""
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; correct its permissions") from None
    if file is None or (file.suffix != ".py" and b"\0" in source):
        # Compiled, or an archive.
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"Python cannot compile the script, and nothing was started; correct it:\n{text}") from None


def _module(name: str, args: Sequence[str]) -> Program:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise UsageError(f"-m {name}: not the name of a module; pass a file without -m")
    if _spec_of_module(name) is None:
        raise UsageError(
            f"-m {name}: there is no such module in {sys.prefix}, or below the working directory; install it, or pass "
            "the path of a file without -m"
        )
    return Program("module", name, tuple(args))


def _after_python(args: Sequence[str]) -> Program:
    """Return the program that an interpreter would run: this one's is used."""
    rest = list(args)
    while rest and rest[0] in _PYTHON_FLAGS:
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-m":
        return _module(rest[1], rest[2:])
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"python {' '.join(args)}".rstrip() + ": pass a Python file, or -m MODULE")
    found = find_program(rest[0], rest[1:])
    assert found is not None
    return found


def _is_installed(path: Path) -> bool:
    """Return whether a file is a command of this environment, named by its path."""
    return path.suffix != ".py" and path.resolve().parent == Path(sysconfig.get_path("scripts")).resolve()


def _which(word: str) -> Path | None:
    """Return the file of a command, in this environment before others."""
    own = Path(sysconfig.get_path("scripts")) / word
    if own.is_file():
        return own
    found = shutil.which(word)
    return Path(found) if found is not None else None


def _command(word: str, path: Path, args: Sequence[str]) -> Program:
    reader = _other_interpreter(path)
    if reader is not None:
        raise UsageError(f"{word!r} is no Python program ({path}: {reader}); pass the Python file that it starts")
    interpreter = _interpreter(_head(path))
    if interpreter and not _is_own(interpreter):
        raise UsageError(
            f"{word!r} belongs to another Python ({path} is run by {interpreter}, and this is {sys.executable}): "
            "install runner into that environment, and call it from there"
        )
    return Program("command", str(path), tuple(args))


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).decode("latin-1")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _interpreter(head: str) -> str:
    """Return the interpreter in a file's first line; empty if there is none."""
    if not head.startswith("#!"):
        return ""
    words = head[2:].splitlines()[0].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if words and Path(words[0]).name == "sh" and (found := _EXECUTED.search(head)):
        return found[1]
    return words[0] if words else ""


def _other_interpreter(path: Path) -> str | None:
    """Return what reads a file, if that is not Python."""
    head = _head(path)
    if "\0" in head:
        return "a binary file"
    interpreter = _interpreter(head)
    name = Path(interpreter).name
    return f"run by {name}" if name and not name.startswith("python") else None


def _is_own(interpreter: str) -> bool:
    path = Path(interpreter)
    if not path.is_absolute():
        return True  # of `env`: whatever comes first on the path
    return path.parent.resolve() == Path(sys.executable).parent.resolve() or not path.exists()


def _spec_of_module(name: str) -> Any:
    """Return the specification of a module, or of a package's `__main__`, without importing its packages."""
    places: Any = [os.getcwd(), *sys.path]  # noqa: PTH109 - as in sys.path
    spec = None
    for part in name.split("."):
        if places is None:
            return None
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    if spec is not None and spec.submodule_search_locations is not None:
        return PathFinder.find_spec("__main__", spec.submodule_search_locations)
    return spec


def _file_of_module(name: str) -> Path | None:
    spec = _spec_of_module(name)
    return Path(spec.origin) if spec is not None and spec.origin else None
