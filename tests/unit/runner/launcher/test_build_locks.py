from __future__ import annotations

import os
from math import inf
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from runner.launcher.build_locks import BuildLocks, extension_folder, remove_abandoned

NOW = 10_000.0


def lock(path: Path, created: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (created, created))
    return path


@pytest.mark.parametrize(
    ("created", "since", "goes"),
    [
        (NOW - 20, NOW - 60, True),  # Our last attempt was killed in the middle of its build.
        (NOW - 20, inf, False),  # This may be another machine's.
        (NOW - 20, NOW - 10, False),
        (NOW - 700, inf, True),
        (NOW - 700, NOW - 10, True),
    ],
)
def test_a_lock_is_removed_when_nobody_can_be_building(
    created: float, since: float, goes: bool, tmp_path: Path
) -> None:
    locks = [lock(tmp_path / "py311_cu128" / "fused_adam" / "lock", created), lock(tmp_path / "mine" / "lock", created)]
    lock(tmp_path / "mine" / "fused.so", 0.0)
    removed = remove_abandoned(tmp_path, since=since, now=NOW)
    assert sorted(removed) == (sorted(locks) if goes else [])
    assert [path.exists() for path in locks] == [not goes] * 2
    assert (tmp_path / "mine" / "fused.so").exists()


def test_the_lock_of_a_running_build_stays(tmp_path: Path) -> None:
    path = lock(tmp_path / "py311_cpu" / "fused_adam" / "lock", NOW - 700)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert remove_abandoned(tmp_path, since=0.0, now=NOW) == []
        assert path.exists()
    finally:
        os.close(descriptor)
    assert remove_abandoned(tmp_path, since=0.0, now=NOW) == [path]


def test_in_a_folder_that_machines_share_only_the_age_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = SimpleNamespace(mountpoint=str(tmp_path.resolve()), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [SimpleNamespace(mountpoint="/", fstype="ext4"), mount])
    new, old = lock(tmp_path / "one" / "lock", NOW - 20), lock(tmp_path / "other" / "lock", NOW - 700)
    assert remove_abandoned(tmp_path, since=NOW - 60, now=NOW) == [old]
    assert new.exists()


def test_a_folder_that_cannot_be_read_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "glob", refused)
    assert remove_abandoned(tmp_path, since=0.0, now=NOW) == []


def test_nothing_was_ever_built(tmp_path: Path) -> None:
    assert remove_abandoned(tmp_path / "none", since=0.0, now=NOW) == []


def test_the_folder_is_the_one_that_torch_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    assert extension_folder(os.environ | {"TORCH_EXTENSIONS_DIR": "/else"}) == Path("/else")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert extension_folder(os.environ) == Path(get_default_build_root())
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert extension_folder(os.environ).resolve() == Path(get_default_build_root())


def test_the_lock_of_the_attempt_before_goes(tmp_path: Path) -> None:
    told: list[str] = []
    locks = BuildLocks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, told.append)
    path = lock(tmp_path / "fused_adam" / "lock", NOW - 5)
    locks.begin_attempt(NOW)  # Who made it is not known.
    lock(path, NOW + 3)
    assert not told
    locks.begin_attempt(NOW + 20)
    assert not path.exists() and told == [f"removed {path}: the build of a torch extension that held it was killed"]
