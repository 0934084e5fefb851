"""Each test has one tier; a run ends with a table of what was not run; nothing from outside the repository is used."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from infra import parts
from infra.parts import PARTS, REASON, Part, lacks, part_of
from infra.tiers import TIERS, table, tier_of

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent


class Item:
    """A collected test, as far as the rule looks at it."""

    def __init__(self, path: str, *marks: pytest.MarkDecorator, fixtures: tuple[str, ...] = (), **params: Any) -> None:
        self.path, self.nodeid, self._marks = TESTS / path, path, [decorator.mark for decorator in marks]
        self.fixturenames = fixtures
        if params:
            self.callspec = type("CallSpec", (), {"params": params})

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self._marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


def tier(path: str, *marks: pytest.MarkDecorator, fixtures: tuple[str, ...] = (), **params: Any) -> str:
    item: Any = Item(path, *marks, fixtures=fixtures, **params)
    return tier_of(item)


def test_the_folder_decides() -> None:
    assert tier("unit/runner/test_x.py") == tier("contract/test_x.py") == "fast"
    assert tier("integration/test_x.py") == tier("chaos/test_x.py") == tier("compatibility/test_x.py") == "process"


def test_a_part_of_the_machine_makes_it_system() -> None:
    assert tier("contract/test_x.py", parts.needs("strace")) == "system"
    assert tier("contract/test_x.py", fixtures=("tmp_path", "radosgw_s3")) == "system"
    # A fixture that goes by its parameter asks for the server later.
    assert tier("contract/test_x.py", location="rclone") == "system"
    assert tier("contract/test_x.py", location="memory") == "fast"
    assert tier("unit/test_x.py", parts.needs("tmpfs")) == "fast", "made in milliseconds"


def test_a_marker_goes_before_all_else_and_there_is_one() -> None:
    assert tier("unit/test_x.py", pytest.mark.process) == "process"
    assert tier("contract/test_x.py", pytest.mark.soak, fixtures=("radosgw_s3",)) == "soak"
    with pytest.raises(pytest.UsageError, match="one tier, not process and soak"):
        tier("unit/test_x.py", pytest.mark.process, pytest.mark.soak)


def test_this_run_has_given_each_test_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len([name for name in TIERS if item.get_closest_marker(name)]) == 1, item.nodeid


def test_the_table_counts_tests_by_part_and_says_how_to_get_it() -> None:
    reasons = [f"Skipped: {REASON}strace: no strace on the PATH"] * 2 + ["Skipped: only on Tuesdays"]
    lines = table([*reasons, f"Skipped: {REASON}radosgw: no radosgw on the PATH"])
    assert [line.split(maxsplit=2) for line in lines] == [
        ["missing", "tests", "how to get it"],
        ["radosgw", "1", "apt-get install radosgw ceph-mon ceph-osd ceph-common"],
        ["strace", "2", "apt-get install strace"],
        ["-", "1", "only on Tuesdays"],
    ]
    assert table([]) == []


def test_a_skip_names_its_part() -> None:
    with pytest.raises(pytest.skip.Exception) as caught:
        lacks("memory cgroup", "Read-only file system")
    assert part_of(str(caught.value)) == "memory cgroup"
    assert part_of("Skipped: only on Tuesdays") is None


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Part("x", commands=("no-such-program",), packages=("p",)).missing() == "no no-such-program on the PATH"
    assert Part("x", modules=("no_such_module",)).missing() == "no Python module no_such_module"
    assert Part("x", check=lambda: "no luck").missing() == "no luck"
    assert Part("x", commands=("sh",)).missing() == ""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert Part("x", root=True).missing() == "not running as root"
    assert (
        Part("x", packages=("p",), wheels=("w",), root=True).remedy() == "apt-get install p; pip install w; run as root"
    )


def test_every_part_says_how_to_get_it() -> None:
    assert all(part.remedy() for part in PARTS.values())


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.split("\0") if name]
    # Without git, as in an unpacked archive.
    found = [ROOT / name for name in names] or [*TESTS.rglob("*"), *(ROOT / "scripts").rglob("*")]
    return [path for path in found if path.suffix in (".py", ".sh", "") and path.is_file()]


def test_nothing_is_looked_for_outside_the_repository() -> None:
    outside = re.compile(r"parents\[[2-9]\]\s*/\s*\"shared\"|\.parent\s*/\s*\"shared\"|\.\./shared")
    places = [path for path in files() if path != Path(__file__) and outside.search(path.read_text(errors="replace"))]
    assert not places


def test_skips_come_from_the_registry_of_parts() -> None:
    """So that the table can say how to get what is missing."""
    # These are about the case that is tried, or about versions, not about the machine.
    allowed = {"compatibility/test_compatibility.py", "infra/parts.py", "unit/scripts/test_render_reference.py"}
    own = re.compile(r"pytest\.skip\(|importorskip\(|shutil\.which\(")
    found = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if path != Path(__file__) and own.search(path.read_text())
    }
    assert found - allowed == set()
