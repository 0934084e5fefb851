"""What the doctor finds of a program's imports, without running it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from runner.doctor import program_imports
from runner.doctor.findings import Finding, Level
from runner.doctor.program_imports import check_imports, survey_imports, top_level_imports, try_imports_of
from runner.program.program import Program


def write(folder: Path, **files: str) -> Path:
    """Files of Python; `__` in a name is a folder."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "train.py"


def problems(file: Path) -> list[tuple[Level, str]]:
    return [(one.level, one.text) for one in survey_imports(file, [str(file.parent), *sys.path[1:]]).problems]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a, b.c as d", [("a", True), ("b.c", True)]),
        ("from a.b import c", [("a.b", True)]),
        ("from . import a", [("", True)]),
        ("def f():\n    import a", []),
        ("try:\n    import a\nexcept ImportError:\n    import b\nelse:\n    import c", [("c", False)]),
        ("try:\n    import a\nfinally:\n    pass", [("a", True)]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", [("b", True)]),
        ("if typing.TYPE_CHECKING:\n    import a", []),
        ("if x:\n    import a\nelse:\n    import b", [("a", False), ("b", False)]),
        ("if __name__ == '__main__':\n    import a", [("a", True)]),
        ("if x:\n    if __name__ == '__main__':\n        import a", [("a", False)]),
        ("with x:\n    import a", [("a", True)]),
        ("class A:\n    import a", [("a", True)]),
    ],
)
def test_which_imports_are_run_when_a_program_starts(text: str, found: list[tuple[str, bool]]) -> None:
    assert [(one.name, one.is_certain) for one in top_level_imports(ast.parse(text))] == found


def test_a_missing_module_is_named_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, train="import os\nimport click\nimport not_there.inner\n")
    assert problems(file) == [(Level.FAIL, "train.py:3: no module 'not_there'")]


@pytest.mark.parametrize(
    "text",
    [
        "if x:\n    import not_there",
        "import sys\nsys.path.insert(0, 'lib')\nimport not_there",
        # Packages may make modules when they are imported.
        "import click.not_there",
    ],
)
def test_what_may_be_found_when_the_program_runs_is_a_warning(text: str, tmp_path: Path) -> None:
    [(level, said)] = problems(write(tmp_path, train=text))
    assert level is Level.WARN and "not_there" in said


@pytest.mark.parametrize("text", ["import os.path", "from click import Path", "import xml.dom.minidom", "import sys"])
def test_what_is_found(text: str, tmp_path: Path) -> None:
    assert problems(write(tmp_path, train=text)) == []


def test_the_programs_own_modules_are_followed_and_not_run(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        train="import helper\nfrom pkg import part\nfrom pkg.deep import other\n",
        helper="raise SystemExit('run')",
        pkg____init__="raise SystemExit('run')",
        pkg__part="from . import sibling\nfrom .deep import other\n",
        pkg__sibling="import missing_a",
        pkg__deep____init__="",
        pkg__deep__other="from ..sibling import x\nfrom .nothing import y\nimport missing_b",
    )
    found = problems(file)
    assert sorted(found) == sorted(
        [
            (Level.FAIL, "sibling.py:1: no module 'missing_a'"),
            (Level.FAIL, "other.py:2: no module 'nothing'"),
            (Level.FAIL, "other.py:3: no module 'missing_b'"),
        ]
    )


def test_an_own_module_that_python_cannot_compile(tmp_path: Path) -> None:
    [(level, text)] = problems(write(tmp_path, train="import helper", helper="def ("))
    assert level is Level.FAIL and "helper.py cannot be read as Python" in text


def test_a_file_in_another_encoding_and_one_that_is_compiled(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\nimport missing\n".encode("latin-1"))
    assert problems(file) == [(Level.FAIL, "train.py:3: no module 'missing'")]
    compiled = tmp_path / "train.pyc"
    compiled.write_bytes(b"\0\xa7")
    assert problems(compiled) == []


def test_a_relative_import_of_a_program_that_is_named_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", b__train="from ..near import x\nfrom ..far import y", near="")
    monkeypatch.chdir(tmp_path / "a" / "b")
    found = [(one.level, one.text) for one in survey_imports(Path("train.py"), [".", *sys.path[1:]]).problems]
    assert found == [(Level.FAIL, "train.py:2: no module 'far'")]


def test_a_module_that_imports_itself_ends(tmp_path: Path) -> None:
    assert problems(write(tmp_path, train="import helper", helper="import train\nimport helper")) == []


def test_an_environment_in_the_working_directory_is_not_the_programs_own(tmp_path: Path) -> None:
    packages = tmp_path / ".venv" / "site-packages"
    write(packages, library="import missing")
    file = write(tmp_path, train="import library")
    survey = survey_imports(file, [str(tmp_path), str(packages)])
    assert survey.problems == [] and survey.files == [file] and list(survey.packages) == ["library"]


def test_a_script_is_looked_up_from_its_folder_and_a_module_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "sub", train="import near", near="")
    write(tmp_path, far="")
    monkeypatch.chdir(tmp_path)
    assert [one.level for one in check_imports(Program("script", "sub/train.py"))] == [Level.OK]
    write(tmp_path / "sub", train="import far", __init__="")
    assert [one.level for one in check_imports(Program("script", "sub/train.py"))] == [Level.FAIL]
    assert [one.level for one in check_imports(Program("module", "sub.train"))] == [Level.OK]


def test_an_installed_command_is_not_looked_at() -> None:
    assert list(check_imports(Program("command", sys.executable))) == []


# -- trial imports ---------------------------------------------------------------------------------------------------


def tried(folder: Path, text: str) -> list[Finding]:
    file = write(folder, train=f"import own\n{text}", own="raise SystemExit('run')")
    return list(try_imports_of(Program("script", str(file))))


def test_packages_are_imported_and_the_program_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    write(
        packages,
        sound_package="",
        broken_package="raise RuntimeError('no driver')",
        slow_package="import time; time.sleep(9)",
    )
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    [found] = tried(tmp_path, "import sound_package, os")
    assert (found.level, found.text) == (Level.OK, "sound_package can be imported")
    [found] = tried(tmp_path, "import sound_package, broken_package")
    assert found.level is Level.FAIL
    assert found.text == "import broken_package failed: RuntimeError: no driver"
    monkeypatch.setattr(program_imports, "_LOAD_S", 0.5)
    [found] = tried(tmp_path, "import slow_package")
    assert found.level is Level.FAIL and "slow_package is not imported after" in found.text
    assert tried(tmp_path, "import os") == []
