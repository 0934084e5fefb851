"""Which limit an error speaks of, what it is here, and how to raise it."""

from __future__ import annotations

import io
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpointing.host import limits
from checkpointing.host.limits import explained, raise_open_files, room_for_processes


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of cgroups, below a folder."""
    monkeypatch.setattr(limits, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path


def cgroup(system: Path, line: str, folder: str, limit: str, count: int) -> None:
    (system / "proc" / "self" / "cgroup").write_text(f"3:cpu:/elsewhere\n{line}\n")
    place = system / "sys" / "fs" / "cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "pids.max").write_text(f"{limit}\n")
    (place / "pids.current").write_text(f"{count}\n")


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("7:pids:/job/one", "pids/job/one"),
        ("0::/job", "job"),
        ("0::/../../kubepods/pod1", ""),  # a container's own view
        ("7:pids:/docker/abc", "pids"),
    ],
)
def test_a_limit_of_processes_is_named_with_its_value(line: str, folder: str, system: Path) -> None:
    cgroup(system, line, folder, "44", 43)
    for text in ("RuntimeError: can't start new thread", "[Errno 11] Resource temporarily unavailable"):
        said = explained(text)
        assert "may have 44 processes and threads (pids.max), and has 43" in said and "raise" in said
    assert room_for_processes() == 1


def test_without_a_cgroups_limit_that_of_the_user_is_named(system: Path) -> None:
    cgroup(system, "7:pids:/job", "pids/job", "max", 43)
    assert "pids.max" not in explained(limits.NO_THREAD) and "(ulimit -u): raise that" in explained(limits.NO_THREAD)
    assert room_for_processes() == math.inf
    (system / "proc" / "self" / "cgroup").unlink()
    assert room_for_processes() == math.inf


def test_other_limits_and_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 128))
    assert explained("OSError: [Errno 24] Too many open files: '/x'") == (
        "; a process may open 64 files (ulimit -n): raise that"
    )
    assert "64 bytes (ulimit -f)" in explained("[Errno 27] File too large")
    assert explained("KeyError: 'files'") == ""


@pytest.mark.parametrize(
    ("limit", "wanted", "soft"),
    [((64, 128), 100, 100), ((64, 128), 1000, 128), ((2000, 4000), 1000, 2000), ((64, resource.RLIM_INFINITY), 10, 64)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    limit: tuple[int, int], wanted: int, soft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[Any] = [limit]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: current[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, value: current.append(value))
    raise_open_files(wanted)
    assert current[-1] == (soft, limit[1])


def test_a_run_begins_with_more_open_files_than_a_shell_gives() -> None:
    program = "import resource; from checkpointing.host.limits import raise_open_files; raise_open_files(); "
    program += "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    shell = f'ulimit -Sn 256; exec "{sys.executable}" -c "{program}"'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert int(io.StringIO(done.stdout).readline()) == (65536 if hard == resource.RLIM_INFINITY else min(65536, hard))
