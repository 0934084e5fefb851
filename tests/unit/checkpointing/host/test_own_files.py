"""Links in the place of our files are not followed, and who may read what is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointing.host.locking import open_lock, try_lock
from checkpointing.host.own_files import ForeignLink, check_own_folder, make_own_folder, open_own, private_mode
from checkpointing.storage.durable import create_file, replace_file
from checkpointing.storage.sidecars import LocalSidecars
from runner.journal.journal import Journal

SECRET = b"somebody's keys\n"
LINKS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic": lambda path, victim: path.symlink_to(victim),
    "hard": lambda path, victim: path.hardlink_to(victim),
}


@pytest.fixture(params=LINKS)
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A link to a file of somebody else, which is as before in the end."""
    (tmp_path / "home").mkdir()
    (tmp_path / "volume").mkdir()
    victim = tmp_path / "home" / "keys"
    victim.write_bytes(SECRET)
    LINKS[request.param](tmp_path / "volume" / "file", victim)
    yield tmp_path / "volume" / "file"
    assert victim.read_bytes() == SECRET


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_a_lock_behind_a_link_is_refused(planted: Path) -> None:
    with pytest.raises(ForeignLink, match=r"file is a link that this run has not made; replace it"):
        open_lock(planted)


def test_a_journal_behind_a_link_is_refused(planted: Path) -> None:
    with pytest.raises(ForeignLink):
        Journal(planted, lambda: 0.0)


def test_a_small_file_takes_the_place_of_a_link(planted: Path) -> None:
    target = planted.with_name("target")
    replace_file(target, b"ours", planted)
    assert target.read_bytes() == b"ours" and not planted.exists()
    planted.hardlink_to(planted.parents[1] / "home" / "keys")
    assert create_file(target.with_name("second"), b"ours", planted)
    # Also where the name of the file itself is a link.
    planted.symlink_to(planted.parents[1] / "home" / "keys")
    replace_file(planted, b"ours", planted.with_name("t"))
    assert planted.read_bytes() == b"ours" and not planted.is_symlink()


def test_a_folder_behind_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / ".records").symlink_to(tmp_path / "home")
    check_own_folder(tmp_path / ".records")  # Our own may lead to another disk.
    if os.geteuid() == 0:
        os.chown(tmp_path / ".records", 4711, 4711, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ForeignLink):
        LocalSidecars(tmp_path, lambda: True).write("secret", b"x")
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o600), (0o077, 0o600), (0o027, 0o600), (0o002, 0o660)], indirect=["umask"]
)
def test_who_may_read(umask: None, mode: int, tmp_path: Path) -> None:
    assert private_mode() == mode
    make_own_folder(tmp_path / "a" / "b", parents=True)
    (tmp_path / "t").write_text("planted")
    (tmp_path / "t").chmod(0o666)
    replace_file(tmp_path / "job.json", b"x", tmp_path / "t", private=True)
    assert (tmp_path / "job.json").stat().st_mode & 0o777 == mode
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == (0o700 if mode == 0o600 else 0o770)


def test_a_lock_of_ours_is_no_link(tmp_path: Path) -> None:
    assert try_lock(open_lock(tmp_path / "lock"))
    # Moved away while it is held, as when a run is moved aside.
    fd = open_own(tmp_path / "lock", os.O_RDWR)
    (tmp_path / "lock").unlink()
    assert os.fstat(fd).st_nlink == 0
