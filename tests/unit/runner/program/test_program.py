"""What a command line names is found without importing any of it, and what is no Python is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.program.program import Program, check_syntax, find_program


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with programs of every kind, and an environment with commands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('imported')\n")
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "job.py", "inner/__init__.py", "inner/__main__.py"):
        (package / name).write_text("raise SystemExit('imported')\n")
    scripts = tmp_path / "bin"
    scripts.mkdir()
    commands = {
        "own-cli": f"#!{sys.executable}\nfrom package import main\n",
        "env-cli": "#!/usr/bin/env python3\nimport sys\n",
        "long-cli": f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\nimport sys\n",
        "other-cli": "#!/bin/python3\nimport sys\n",
        "shell-cli": "#!/bin/bash\nexec train\n",
    }
    for name, text in commands.items():
        (scripts / name).write_text(text)
    (scripts / "binary").write_bytes(b"\x7fELF\0\0")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(scripts))
    return tmp_path


def test_without_a_word_there_is_none() -> None:
    assert find_program(None, []) is None
    with pytest.raises(UsageError, match="-m needs the name of a module"):
        find_program(None, [], module=True)


def test_a_file_is_a_script() -> None:
    found = find_program("train.py", ["--lr", "1"])
    assert found == Program("script", "train.py", ("--lr", "1"))
    assert (found.label, found.stem, found.file) == ("train.py", "train", Path("train.py"))
    assert found.from_anywhere().name == str(Path("train.py").absolute())


@pytest.mark.parametrize(
    ("name", "file"),
    [("package.job", "package/job.py"), ("package.inner", "package/inner/__main__.py")],
)
def test_a_module_is_found_and_not_imported(name: str, file: str, folder: Path) -> None:
    found = find_program(name, ["x"], module=True)
    assert found == Program("module", name, ("x",)) and found.from_anywhere() is found
    assert found.file == folder / file and not {"package", name} & sys.modules.keys()
    assert (found.label, found.stem) == (name, name.replace(".", "-"))


@pytest.mark.parametrize("name", ["nothing", "package.nothing", "package", "package.job.more", "json.nothing"])
def test_a_module_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"-m {name}: there is no such module in "):
        find_program(name, [], module=True)


def test_a_file_is_no_name_of_a_module() -> None:
    with pytest.raises(UsageError, match="not the name of a module; pass a file without -m"):
        find_program("./train.py", [], module=True)


@pytest.mark.parametrize("command", ["own-cli", "env-cli", "long-cli"])
def test_a_command_of_a_package_is_its_file(command: str, folder: Path) -> None:
    found = find_program(command, ["train", "job.yaml"])
    assert found == Program("command", str(folder / "bin" / command), ("train", "job.yaml"))
    assert (found.label, found.stem, found.file) == (command, command, None)


def test_a_command_may_be_named_by_its_path(folder: Path) -> None:
    """As `runner rehearse` does: as a script, the launchers in it would start ranks of their own."""
    for word in ("bin/own-cli", str(folder / "bin" / "own-cli")):
        found = find_program(word, ["train"])
        assert found is not None and (found.kind, found.label, found.args) == ("command", "own-cli", ("train",))


def test_a_file_hides_a_command_unless_that_is_asked_for(folder: Path) -> None:
    Path("own-cli").write_text("print()\n")
    found, command = find_program("own-cli", []), find_program("own-cli", [], command=True)
    assert found is not None and found.kind == "script" and command is not None and command.kind == "command"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("shell-cli", "is no Python program .*run by bash"),
        ("binary", "is no Python program .*a binary file"),
        ("other-cli", "belongs to another Python .*run by /bin/python3, and this is "),
        ("missing-cli", "script 'missing-cli' does not exist; pass the path of a Python file, -m MODULE, or a command"),
        ("missing.py", "script 'missing.py' does not exist"),
        ("bin/shell-cli", "is no Python program"),
    ],
)
def test_what_is_no_python_of_this_environment_is_refused(
    command: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: True)
    with pytest.raises(UsageError, match=text):
        find_program(command, [])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["train.py", "-u"], Program("script", "train.py", ("-u",))),
        (["-u", "train.py"], Program("script", "train.py")),
        (["-u", "-m", "package.job", "x"], Program("module", "package.job", ("x",))),
    ],
)
def test_an_interpreter_in_front_is_this_one(args: list[str], expected: Program) -> None:
    assert find_program("python", args) == find_program("/usr/bin/python3.11", args) == expected


@pytest.mark.parametrize("args", [[], ["-c", "print()"], ["-m"]])
def test_an_interpreter_without_a_program_is_refused(args: list[str]) -> None:
    with pytest.raises(UsageError, match="pass a Python file, or -m MODULE"):
        find_program("python3", args)


def test_a_program_is_what_its_json_says() -> None:
    program = Program("module", "package.job", ("--lr", "1"))
    assert Program.from_json(program.to_json()) == program


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (b"x = 1\ndef f(:\n", ["line 2", "    def f(:\n", "^", "SyntaxError: invalid syntax"]),
        (b"def f():\nx = 1\n", ["line 2", "IndentationError: expected an indented block"]),
        (b"x = '\xff'\n", ["SyntaxError", "utf-8"]),
        (b"x = 1\0\n", ["SyntaxError"]),
    ],
)
def test_a_script_that_does_not_compile_is_shown_as_python_shows_it(
    source: bytes, shown: list[str], tmp_path: Path
) -> None:
    """It was found after the launch, a minute later."""
    script = tmp_path / "train.py"
    script.write_bytes(source)
    with pytest.raises(UsageError, match="nothing was started") as caught:
        check_syntax(Program("script", str(script)))
    assert all(part in str(caught.value) for part in shown), caught.value


def test_what_python_can_run_is_not_refused(tmp_path: Path) -> None:
    script = tmp_path / "train"
    for source in (b"# -*- coding: latin-1 -*-\nx = '\xff'\n", b"x = '\\d'\nassert x is 'y'\n", b"PK\x03\x04\0\0", b""):
        script.write_bytes(source)
        check_syntax(Program("script", str(script)))
    check_syntax(Program("module", "json.tool"))
    check_syntax(Program("command", "/no/such"))
