"""What the figures count, on small made-up trees; and the bars that the code has reached."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
EVENTS = 'class Committed(Event, name="committed"): pass\nclass Log(Event, name="log"): pass\n'
STORAGE = "class Storage: pass\nclass LocalStorage(Storage): pass\nclass StorageError(OSError): pass\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "checkpointing/__init__.py": "",
        "checkpointing/agent/events.py": EVENTS,
        "checkpointing/storage/local.py": STORAGE,
        "runner/__init__.py": "",
        "tests/unit/runner/test_short.py": "",
    }.items():
        write(tmp_path, name, text)
    return tmp_path


def write(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_module_is_tested_by_its_mirror_or_by_a_test_that_imports_it(project_figures: ModuleType, tree: Path) -> None:
    for name in ("short", "named", "attribute", "alone", "__main__"):
        write(tree, f"runner/{name}.py", "")
    write(tree, "tests/unit/runner/test_others.py", "from runner.named import x\nfrom runner import attribute\n")
    write(tree, "tests/integration/test_alone.py", "import runner.alone\n")
    found = project_figures.untested_modules(tree, project_figures.sources(tree)).found
    assert "runner.alone" in found
    assert not {"runner.short", "runner.named", "runner.attribute", "runner.__main__"} & set(found)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("isinstance(x, LocalStorage)", 1),
        ("isinstance(x, (int, storage.LocalStorage))", 1),
        ("isinstance(x, StorageError)", 0),
        ("isinstance(x, Manifest)", 0),
    ],
)
def test_type_checks_of_a_back_end(project_figures: ModuleType, tree: Path, text: str, number: int) -> None:
    write(tree, "runner/asks.py", text)
    write(tree, "checkpointing/storage/asks.py", text)
    files = project_figures.sources(tree)
    assert project_figures.storage_type_checks(files).value == number
    assert project_figures.storage_back_end_files(files).value == 1 + number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('send({"event": "committed"})', 1),
        ('event["event"] == "committed"', 1),
        ('event.get("event") in ("committed", "log")', 2),
        ('match event["event"]:\n    case "committed" | "log":\n        pass', 2),
        ('agent.report("committed", 1)', 1),
        ('event["event"] == "no_event_of_ours"', 0),
        ('result["committed"]', 0),
        ('print("committed")', 0),
        ("isinstance(event, Committed)", 0),
    ],
)
def test_strings_that_name_events(project_figures: ModuleType, tree: Path, text: str, number: int) -> None:
    write(tree, "runner/says.py", text)
    assert project_figures.event_name_strings(project_figures.sources(tree)).value == number


@pytest.mark.parametrize(
    "text", ["def f(keep_every=1): pass", "x.keep_every_steps", 'x["keep_every"]', "f(keep_every=1)"]
)
def test_files_that_name_a_retention_option(project_figures: ModuleType, tree: Path, text: str) -> None:
    write(tree, "runner/keeps.py", text)
    write(tree, "runner/other.py", "keep_everything = 1")
    assert project_figures.retention_option_files(project_figures.sources(tree)).found == ["runner/keeps.py"]


@pytest.mark.process
def test_a_module_that_is_excused_exists(project_figures: ModuleType) -> None:
    modules = {file.module for file in project_figures.sources(ROOT)}
    assert set(project_figures.WITHOUT_UNIT_TEST) <= modules


@pytest.mark.process
def test_a_failure_class_touches_one_file(project_figures: ModuleType) -> None:
    figure = project_figures.failure_class_files(ROOT)
    assert figure.passes, figure.found


def test_the_table_tells_a_miss_from_a_pass(project_figures: ModuleType) -> None:
    found = [project_figures.Figure("one", 1, 0), project_figures.Figure("two", 1, 1)]
    assert project_figures.table_of(found).splitlines()[2:] == ["| one | 1 | ≤ 0 | MISS |", "| two | 1 | ≤ 1 | pass |"]
