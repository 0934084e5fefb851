"""Checkpoints that a user keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.checkpointing.agent.doubles import Store, save

from checkpointing.commit.kept import keep, kept_steps, labels, unkeep
from checkpointing.storage import LocalStorage, Storage
from checkpointing.storage.object_storage import ObjectStorage


@pytest.fixture(params=["disk", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "run") if request.param == "disk" else ObjectStorage(Store())


def test_a_checkpoint_is_kept_until_it_is_not(storage: Storage) -> None:
    assert kept_steps(storage) == set() and labels(storage) == {}
    save(storage, 5)
    keep(storage, 5)
    keep(storage, 10, "good \u00e9valuation")
    assert kept_steps(storage) == {5, 10} and labels(storage) == {5: "", 10: "good \u00e9valuation"}
    keep(storage, 5, "other")
    unkeep(storage, 10)
    unkeep(storage, 10)
    assert labels(storage) == {5: "other"}


def test_nothing_else_reads_it(storage: Storage) -> None:
    """Neither as a checkpoint nor as what a dead writer has left."""
    save(storage, 5)
    keep(storage, 5)
    keep(storage, 6)
    assert storage.steps() == [5] and storage.quarantined() == [] and storage.sweep() == []
    storage.begin_attempt(7)
    assert storage.sweep() == [] and kept_steps(storage) == {5, 6}
    storage.remove(5)
    assert kept_steps(storage) == {5, 6}


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[]", b"{}", b'{"label": 3}', b"[" * 100_000])
def test_a_sidecar_that_cannot_be_understood_keeps_all_the_same(storage: Storage, data: bytes) -> None:
    storage.sidecars.write("keep-5.json", data)
    storage.sidecars.write("keep-05.json", data)
    storage.sidecars.write("keep-me.json", data)
    assert kept_steps(storage) == {5} and labels(storage) == {5: ""}
