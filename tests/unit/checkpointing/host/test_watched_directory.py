"""Whether a directory was removed, moved, or is not there with its volume."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from infra.parts import needs

from checkpointing.host.watched_directory import WatchedDirectory


def test_what_was_removed_is_told_from_what_was_moved(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    watched = WatchedDirectory(tmp_path / "run" / "checkpoints")
    assert not watched.was_removed
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert not watched.was_removed
    shutil.rmtree(tmp_path / "elsewhere")
    assert watched.was_removed


def test_what_was_never_there_was_not_removed(tmp_path: Path) -> None:
    assert not WatchedDirectory(tmp_path / "nothing").was_removed


def test_a_server_that_does_not_know_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedDirectory(tmp_path)

    def stale(fd: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "fstat", stale)
    assert not watched.was_removed


@needs("tmpfs")
def test_a_volume_that_is_not_there_was_not_removed(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=True)
    (tmp_path / "checkpoints").mkdir()
    watched = WatchedDirectory(tmp_path / "checkpoints")
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    assert not (tmp_path / "checkpoints").exists() and not watched.was_removed
