"""A disk that fails, fills up or becomes read-only; the errors are the kernel's, or equal to them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from contract.support import assert_good_order, assert_is_what_was_written, commit, leftovers
from helpers.servers import small_disk
from infra.parts import needs

from checkpointing.errors import CommitFailed, Fenced
from checkpointing.storage import open_storage

# The fsyncs of one commit, in this order; the last one makes the rename durable.
FSYNCS = ["model", "state", "manifest.json", ".checkpoint-2.1.tmp", "store"]


def inject(location: Path, operation: str, call: str, what: str) -> tuple[str, str]:
    """Run an operation in a process with an error or a signal in a system call; return its output and the call."""
    log = location.with_name("strace")
    writer = [sys.executable, str(Path(__file__).with_name("writer.py")), str(location), operation]
    result = subprocess.run(
        ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={call}", "-e", f"inject={call}:{what}", *writer],
        capture_output=True,
        text=True,
        timeout=120,
    )
    last, calls = result.stdout.splitlines()[-1], [line for line in log.read_text().splitlines() if f"{call}(" in line]
    if "signal=KILL" in what:
        assert result.returncode == -signal.SIGKILL and last == f"doing {operation}", result
        return last, calls[-1]
    assert result.returncode == 0 and last.startswith(f"failed {operation}"), result
    return last, next(line for line in calls if "(INJECTED)" in line)


def prepared(tmp_path: Path) -> Path:
    location = tmp_path / "store"
    storage = open_storage(str(location))
    storage.begin_attempt(1)
    commit(storage, 1)
    return location


@pytest.mark.parametrize(
    ("call", "what", "at", "told"),
    [
        *[("fsync", f"error=EIO:when={i}", name, "Input/output error") for i, name in enumerate(FSYNCS[:-1], 1)],
        ("pwrite64", "error=ENOSPC", "model", "No space left on device"),
        ("pwrite64", "error=EIO", "model", "Input/output error"),
        ("fallocate", "error=ENOSPC", "model", "No space left on device"),
        ("fallocate", "error=EDQUOT", "model", "Disk quota exceeded"),
        ("rename", "error=EIO", "checkpoint-2", "Input/output error"),
        # The error of a mounted volume whose server no longer knows it.
        ("rename", "error=ESTALE", "checkpoint-2", "Stale file handle"),
    ],
)
@needs("strace")
def test_an_error_fails_the_save_and_leaves_nothing(call: str, what: str, at: str, told: str, tmp_path: Path) -> None:
    location = prepared(tmp_path)
    said, called = inject(location, "commit:2", call, what)
    assert told in said and at in called
    assert leftovers(str(location)) == [] and open_storage(str(location)).steps() == [1]
    assert_good_order(str(location), [1])


@needs("strace")
def test_an_error_after_the_rename_fails_the_save_but_keeps_it(tmp_path: Path) -> None:
    """Whether it would survive a power cut is not known; while it is there, it is whole. Another try makes sure."""
    location = prepared(tmp_path)
    said, called = inject(location, "commit:2", "fsync", f"error=EIO:when={len(FSYNCS)}")
    assert "Input/output error" in said and FSYNCS[-1] in called
    assert_good_order(str(location), [1, 2])
    storage = open_storage(str(location))
    manifest = storage.read_manifest(2)
    assert storage.keeps(manifest)
    assert not storage.keeps(replace(manifest, attempt=9)), "another attempt's is another checkpoint"
    assert not storage.keeps(replace(manifest, step=3))


@pytest.mark.parametrize(
    ("call", "what", "at"),
    [
        *[("fsync", f"signal=KILL:when={i}", name) for i, name in enumerate(FSYNCS, 1)],
        ("rename", "signal=KILL", "checkpoint-2"),
    ],
)
@needs("strace")
def test_killed_in_a_system_call(call: str, what: str, at: str, tmp_path: Path) -> None:
    location = prepared(tmp_path)
    _, called = inject(location, "commit:2", call, what)
    assert at in called
    assert_good_order(str(location), [1, 2] if at == FSYNCS[-1] else [1])


@pytest.mark.parametrize(("call", "number", "at"), [("fsync", 1, ".tmp"), ("rename", 1, ".tmp"), ("fsync", 2, "store")])
@needs("strace")
def test_an_attempt_that_could_not_begin_does_not_block_the_next(
    call: str, number: int, at: str, tmp_path: Path
) -> None:
    """The writer continues with the next attempt, as the supervisor does."""
    location = prepared(tmp_path)
    said, called = inject(location, "begin:2", call, f"error=EIO:when={number}")
    assert "Input/output error" in said and at in called
    assert_good_order(str(location), [1], attempt=4)


@pytest.mark.parametrize("way", ["prune", "prune what is half pruned", "sweep"])
def test_files_of_a_pruned_checkpoint_go_when_its_name_is_gone_for_good(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may undo a rename; the checkpoint would then have its name again, and only some of its files."""
    storage = open_storage(str(prepared(tmp_path)))
    commit(storage, 2)
    if way != "prune":
        (tmp_path / "store" / "checkpoint-1").rename(tmp_path / "store" / ".checkpoint-1.removing")
    if way == "prune what is half pruned":
        commit(storage, 1)
    done: list[str] = []
    fsync, unlink = os.fsync, os.unlink

    def told_fsync(fd: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def told_unlink(path: str, **where: int) -> None:
        done.append("unlink")
        unlink(path, **where)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "unlink", told_unlink)
    if way == "sweep":
        storage.sweep()
    else:
        storage.remove(1)
    assert done == [str(tmp_path / "store"), *["unlink"] * 3] * (2 if way == "prune what is half pruned" else 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "100M") as mount:
        yield mount


def remount(disk: Path, how: str) -> bool:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)
    return True


@pytest.mark.parametrize("when", ["between saves", "in the middle of one"])
def test_a_disk_that_becomes_read_only(when: str, disk: Path) -> None:
    location = str(disk / "store")
    storage = open_storage(location)
    storage.begin_attempt(1)
    commit(storage, 1)
    if when == "between saves":
        remount(disk, "ro")
    with pytest.raises(CommitFailed, match="Read-only file system"):
        commit(storage, 2, may_publish=lambda: remount(disk, "ro"))
    assert storage.steps() == [1]
    remount(disk, "rw")
    # Files that could not be removed then do not block this attempt.
    assert_is_what_was_written(storage, commit(storage, 2))
    assert_good_order(location, [1, 2])


def test_a_location_that_was_removed_is_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run trained to its end and dropped its final state: `put it back`, said its end, of what was gone."""
    root = tmp_path / "run" / "checkpoints"
    storage = open_storage(str(root))
    storage.begin_attempt(3)
    storage.watch_location()
    commit(storage, 1, attempt=3)
    shutil.rmtree(tmp_path / "run")
    manifest = commit(storage, 2, attempt=3)
    assert storage.steps() == [2] and storage.read_manifest(2) == manifest
    assert "was removed while attempt 3 ran; it is made again, and what it held is lost" in capfd.readouterr().err
    storage.sidecars.write("lease-1", b"{}")
    # An older attempt is shut out as before.
    older = open_storage(str(root))
    with pytest.raises(Fenced):
        older.begin_attempt(2)
    storage.begin_attempt(4)
    storage.watch_location()
    shutil.rmtree(root)
    commit(storage, 3, attempt=4)
    assert storage.steps() == [3]


def test_a_location_that_others_have_made_meanwhile_gets_its_fence(tmp_path: Path) -> None:
    """The leader renews its lease there, through a storage of its own."""
    root = tmp_path / "checkpoints"
    storage = open_storage(str(root))
    storage.begin_attempt(3)
    storage.watch_location()
    shutil.rmtree(root)
    open_storage(str(root)).sidecars.write("lease-1", b"{}")
    commit(storage, 2, attempt=3)
    assert storage.steps() == [2] and storage.fence().attempt == 3


def test_a_location_that_was_moved_is_not(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run" / "checkpoints"))
    storage.begin_attempt(3)
    storage.watch_location()
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(CommitFailed, match="existed when attempt 3 began and is gone; put it back"):
        commit(storage, 2, attempt=3)
    assert not (tmp_path / "run").exists()
