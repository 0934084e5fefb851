"""Checkpoints that a user keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import Store, save

from checkpointing.commit.kept import keep, kept_of, kept_steps, labels, remove_unless_kept, unkeep
from checkpointing.format.manifest import Manifest
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.object_storage import ObjectStorage


@pytest.fixture(params=["disk", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "run") if request.param == "disk" else ObjectStorage(Store())


def checkpoint(storage: Storage, step: int, attempt: int = 1) -> Manifest:
    save(storage, step, attempt)
    return storage.read_manifest(step)


def test_a_checkpoint_is_kept_until_it_is_not(storage: Storage) -> None:
    five, ten, twenty = (checkpoint(storage, step) for step in (5, 10, 20))
    every = [five, ten, twenty]
    assert kept_steps(storage) == set() and labels(storage, every) == {} and kept_of(storage, every) == set()
    keep(storage, five)
    keep(storage, ten, "good \u00e9valuation")
    assert kept_steps(storage) == kept_of(storage, every) == {5, 10}
    assert labels(storage, every) == {5: "", 10: "good \u00e9valuation"}
    assert labels(storage, [five]) == {5: ""}
    keep(storage, five, "other")
    unkeep(storage, 10)
    unkeep(storage, 10)
    assert labels(storage, every) == {5: "other"}
    assert [remove_unless_kept(storage, one) for one in every] == [False, True, True] and storage.steps() == [5]


def test_another_checkpoint_of_the_step_is_not_kept(storage: Storage) -> None:
    keep(storage, checkpoint(storage, 5), "mine")
    storage.remove(5)
    other = checkpoint(storage, 5, attempt=2)
    assert kept_of(storage, [other]) == set() and labels(storage, [other]) == {}
    # A user sees by it that there is something to take back.
    assert kept_steps(storage) == {5}
    assert remove_unless_kept(storage, other) and storage.steps() == []


def test_nothing_else_reads_it(storage: Storage) -> None:
    """Neither as a checkpoint nor as what a dead writer has left."""
    five = checkpoint(storage, 5)
    keep(storage, five)
    storage.sidecars.write("keep-6.json", b"{}")
    assert storage.steps() == [5] and storage.quarantined() == [] and storage.sweep() == []
    storage.begin_attempt(7)
    assert storage.sweep() == [] and kept_steps(storage) == {5, 6}
    storage.remove(5)
    assert kept_steps(storage) == {5, 6}


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", b"[]", b"{}", b'{"label": 3}', b'{"label": "", "identity": 3}', b"[" * 100_000]
)
def test_a_sidecar_that_cannot_be_understood_keeps_all_the_same(storage: Storage, data: bytes) -> None:
    storage.sidecars.write("keep-5.json", data)
    storage.sidecars.write("keep-05.json", data)
    storage.sidecars.write("keep-me.json", data)
    five = checkpoint(storage, 5)
    assert kept_steps(storage) == kept_of(storage, [five]) == {5} and labels(storage, [five]) == {5: ""}
    assert not remove_unless_kept(storage, five)
