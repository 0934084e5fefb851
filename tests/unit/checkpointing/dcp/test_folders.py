"""What a `checkpoint_id` names, and what its folder says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.dcp.folders import (
    METADATA,
    DigestedFile,
    LocalFolder,
    ObjectFolder,
    _Upload,
    entry_of,
    new_save,
    open_folder,
)
from checkpointing.errors import CommitFailed, ForeignCheckpoint, InvalidCheckpoint
from checkpointing.format.digest import PART_BYTES, digest_buffer
from checkpointing.format.manifest import Manifest


def manifest(save: str, *names: str, nbytes: int = 3, index: bytes = b"index", attempt: int = 1) -> Manifest:
    files = [entry_of(f"{save}/{name}", b"x" * nbytes) for name in names]
    return Manifest("", attempt, 7, 1, 0, 0.0, (*files, entry_of(METADATA, index)))


def save(folder: LocalFolder, index: bytes = b"index") -> str:
    name = new_save(1)
    with folder.create(name, "__0_0.distcp") as file:
        file.write(b"xxx")
    folder.publish(name, index, manifest(name, "__0_0.distcp", index=index))
    return name


@pytest.mark.parametrize(
    ("checkpoint_id", "where", "step"),
    [
        ("/runs/step-100", "/runs/step-100", 100),
        ("/runs/epoch_3/", "/runs/epoch_3", 3),
        ("/runs/iter_0000020", "/runs/iter_0000020", 20),
        ("/runs/last", "/runs/last", 0),
        ("/runs/step-5-final", "/runs/step-5-final", 5),
        ("file:///runs/step-100", "/runs/step-100", 100),
        ("memory://runs/step-100", "memory://runs/step-100", 100),
    ],
)
def test_a_path_or_a_url_names_a_folder_and_a_step(checkpoint_id: str, where: str, step: int) -> None:
    folder = open_folder(checkpoint_id)
    assert (folder.where, folder.step) == (where, step)
    assert isinstance(folder, ObjectFolder if "memory" in where else LocalFolder)


def test_a_path_is_kept_when_the_program_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = open_folder("step-1")
    monkeypatch.chdir("/")
    assert folder.where == str(tmp_path / "step-1")


def test_nothing_is_visible_before_it_is_published(tmp_path: Path) -> None:
    folder, name = LocalFolder(tmp_path / "step-7"), new_save(1)
    with folder.create(name, "__0_0.distcp") as file:
        file.write(b"xxx")
    assert [path.name for path in tmp_path.iterdir()] == [".checkpointing"]
    folder.discard(name)
    assert not list((tmp_path / ".checkpointing").iterdir())


def test_a_file_that_another_node_has_written_elsewhere_is_missed(tmp_path: Path) -> None:
    folder, name = LocalFolder(tmp_path / "step-7"), new_save(1)
    with folder.create(name, "__0_0.distcp") as file:
        file.write(b"xxx")
    with pytest.raises(CommitFailed, match=r"__1_0.distcp was written by another node, and is not there"):
        folder.publish(name, b"index", manifest(name, "__0_0.distcp", "__1_0.distcp"))
    assert not (tmp_path / "step-7").exists()


def test_what_is_published_has_its_index_and_its_sizes_checked(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "step-7")
    with pytest.raises(ForeignCheckpoint):
        folder.published()
    name = save(folder)
    assert bytes(folder.published().read(f"{name}/__0_0.distcp")) == b"xxx"
    with pytest.raises(FileNotFoundError):
        folder.published().read("other")
    (tmp_path / "step-7" / METADATA).write_bytes(b"other")
    with pytest.raises(InvalidCheckpoint, match=r"\.metadata was altered"):
        folder.published()
    (tmp_path / "step-7" / METADATA).unlink()
    with pytest.raises(InvalidCheckpoint, match="it was never committed"):
        folder.published()


def test_a_save_whose_publication_was_cut_does_not_hide_the_earlier_one(tmp_path: Path) -> None:
    """It was killed when its files had their place, before the index was replaced."""
    folder = LocalFolder(tmp_path / "last")
    first = save(folder)
    cut = new_save(1)
    (tmp_path / "last" / cut).mkdir()
    (tmp_path / "last" / cut / "manifest.json").write_bytes(manifest(cut, "a", index=b"later").to_json())
    assert folder.published().manifest.files[0].name == f"{first}/__0_0.distcp"
    second = save(folder, b"third")
    assert sorted(path.name for path in (tmp_path / "last").iterdir()) == sorted([METADATA, second])


def test_a_file_is_digested_while_it_is_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        digested = DigestedFile(file)
        assert digested.write(b"abc") == 3 and digested.write(memoryview(b"de")) == 2 and digested.tell() == 5
    assert digested.entry("name") == entry_of("name", b"abcde")
    assert (tmp_path / "file").read_bytes() == b"abcde"


class Store:
    """Takes uploads; fails after some pieces."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.data, self._left = bytearray(), fails_after

    def upload(self, key: str, pieces: object) -> int:
        """Keep the pieces."""
        for piece in pieces:  # type: ignore[attr-defined]
            if self._left == 0:
                raise OSError(28, "full")
            self._left = None if self._left is None else self._left - 1
            self.data += piece
        return len(self.data)


def test_an_upload_is_sent_in_parts_and_its_failure_reaches_the_writer() -> None:
    store = Store()
    upload = _Upload(store, "key")  # type: ignore[arg-type]
    data = bytes(PART_BYTES + 5)
    assert upload.write(data) == len(data) and upload.tell() == len(data)
    upload.finish()
    assert digest_buffer(bytes(store.data)) == digest_buffer(data)
    failing = _Upload(Store(fails_after=0), "key")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="full"):
        for _ in range(6):
            failing.write(data)
    failing.give_up()
    abandoned = Store()
    other = _Upload(abandoned, "key")  # type: ignore[arg-type]
    other.write(b"torn")
    other.give_up()
    assert isinstance(other._error, InterruptedError) and not abandoned.data


def test_a_save_removes_only_what_is_of_its_own_name(tmp_path: Path) -> None:
    """`last.v2` begins as `last` does."""
    other, name = LocalFolder(tmp_path / "last.v2"), new_save(1)
    with other.create(name, "__0_0.distcp") as file:
        file.write(b"xxx")
    cut = new_save(1)
    with LocalFolder(tmp_path / "last").create(cut, "__0_0.distcp") as file:
        file.write(b"cut")
    save(LocalFolder(tmp_path / "last"))
    assert [path.name for path in (tmp_path / ".checkpointing").glob("*.tmp")] == [f"last.v2.{name}.tmp"]
    other.publish(name, b"index", manifest(name, "__0_0.distcp"))
