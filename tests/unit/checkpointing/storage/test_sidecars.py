"""What is kept with the checkpoints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chaos.stores import MemoryObjects

from checkpointing.host.own_files import private_mode
from checkpointing.storage.sidecars import LocalSidecars, ObjectSidecars, Sidecars, attempt_of


@pytest.fixture(params=["local", "objects"])
def sidecars(request: pytest.FixtureRequest, tmp_path: Path) -> Sidecars:
    if request.param == "local":
        return LocalSidecars(tmp_path, may_create=lambda: True)
    return ObjectSidecars(MemoryObjects())


def test_a_file_is_kept_under_its_name(sidecars: Sidecars) -> None:
    assert (sidecars.sizes(), sidecars.read("job.json")) == ({}, b"")
    sidecars.write("job.json", b"one")
    sidecars.write("job.json", b"two!")
    sidecars.write("journal.1", b"")
    assert sidecars.sizes() == {"job.json": 4, "journal.1": 0}
    assert (sidecars.sizes("journal"), sidecars.read("job.json")) == ({"journal.1": 0}, b"two!")


def test_a_private_file_is_its_users_alone(tmp_path: Path) -> None:
    local = LocalSidecars(tmp_path, may_create=lambda: True)
    for name, private in (("mine", True), ("everybodys", False)):
        local.write(name, b"x", private=private)
        assert (private_mode() == (tmp_path / ".records" / name).stat().st_mode & 0o777) is private


def test_of_several_writers_one_creates_a_file(sidecars: Sidecars) -> None:
    assert sidecars.decides
    assert sidecars.create("lease-1", b"a") and not sidecars.create("lease-1", b"b")
    # An earlier call was carried out, and its answer was lost.
    assert sidecars.create("lease-1", b"a")
    assert sidecars.read("lease-1") == b"a" and list(sidecars.sizes()) == ["lease-1"]
    sidecars.remove("lease-1")
    sidecars.remove("lease-1")
    assert sidecars.sizes() == {} and sidecars.create("lease-1", b"b")


def test_many_threads_that_create_a_file_have_one_winner(sidecars: Sidecars) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: sidecars.create("lease-1", b"%d" % number), range(64)))
    assert won.count(True) == 1 and sidecars.read("lease-1") == b"%d" % won.index(True)


def test_a_part_of_a_file_is_kept(sidecars: Sidecars, tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"0123456789")
    sidecars.write_part("journal.1", tmp_path / "journal", 2, 5)
    assert sidecars.read("journal.1") == b"234"
    with pytest.raises(FileNotFoundError):
        sidecars.write_part("journal.2", tmp_path / "gone", 0, 1)


def test_a_restart_state_gives_way_to_one_of_the_same_or_a_newer_attempt(sidecars: Sidecars) -> None:
    assert sidecars.read_restart_state() is None
    for text in (b'{"attempt": 2}', b'{"attempt": 2, "x": 1}', b'{"attempt": 1}'):
        sidecars.replace_restart_state(text)
    assert sidecars.read_restart_state() == b'{"attempt": 2, "x": 1}'
    # It is no sidecar of a name.
    assert sidecars.sizes() == {}


@pytest.mark.parametrize("data", [None, b"", b"torn", b"[]", b"{}", b'{"attempt": "1"}', b"[" * 100_000])
def test_a_damaged_restart_state_gives_way(data: bytes | None) -> None:
    assert attempt_of(data) == -1
    assert attempt_of(b'{"attempt": 7}') == 7


def test_a_directory_that_was_moved_away_is_not_made_again(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path / "moved", may_create=lambda: False)
    with pytest.raises(FileNotFoundError):
        sidecars.write("a", b"")
    with pytest.raises(FileNotFoundError):
        sidecars.write_restart_state(b"{}")
    LocalSidecars(tmp_path / "new", may_create=lambda: True).write("a", b"")
