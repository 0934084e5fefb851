"""`torch.distributed.checkpoint` on every storage: published at once, verified when it is loaded, readable by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_dcp import Reports, commit_and_verify, dcp, environment_of, spoil
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpointing.agent.events import CheckpointQuarantined, CommitFailedEvent, Committed, Resumed
from checkpointing.dcp.folders import METADATA, open_folder
from checkpointing.dcp.protected_calls import DamagedCheckpoint
from checkpointing.errors import CommitFailed, Fenced
from checkpointing.host import failpoints

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)", "ignore:Detected an existing checkpoint"
)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    return commit_and_verify(monkeypatch)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"weight": torch.arange(50_000.0) + value, "empty": torch.zeros(0)}, "step": int(value), "t": (1,)}


def loaded(place: str) -> dict[str, Any]:
    into = state(-1.0)
    dcp.load(into, checkpoint_id=place)
    return into


def is_state(found: dict[str, Any], value: float) -> bool:
    return bool((found["model"]["weight"] == state(value)["model"]["weight"]).all()) and found["step"] == int(value)


def test_what_is_saved_is_loaded_and_nothing_else_is_left(location: str, reports: Reports) -> None:
    place = f"{location}/step-7"
    dcp.save(state(7), checkpoint_id=place)
    assert is_state(loaded(place), 7)
    sizes = open_folder(place).sizes()
    assert sorted(name.rpartition("/")[2] for name in sizes) == [METADATA, "__0_0.distcp", "manifest.json"]
    assert [(type(one), one.step) for one in reports] == [(Committed, 7), (Resumed, 7)]


def test_a_later_save_of_the_same_name_replaces_the_earlier_one(location: str, reports: Reports) -> None:
    place = f"{location}/last"
    for value in (1, 2):
        dcp.save(state(value), checkpoint_id=place)
    assert is_state(loaded(place), 2) and len(open_folder(place).sizes()) == 3


@pytest.mark.parametrize("where", ["dcp.written", "dcp.publishing"])
def test_a_save_that_fails_leaves_the_earlier_one(
    where: str, location: str, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{location}/last"
    dcp.save(state(1), checkpoint_id=place)
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "_armed", failpoints._parse(f"{where}=full"))
        with pytest.raises((OSError, dcp.CheckpointException), match=r"No space left|CheckpointException"):
            dcp.save(state(2), checkpoint_id=place)
    assert is_state(loaded(place), 1)
    [failed] = [one for one in reports if isinstance(one, CommitFailedEvent)]
    assert failed.step == 0 and "OSError" in failed.error
    dcp.save(state(3), checkpoint_id=place)
    assert is_state(loaded(place), 3) and len(open_folder(place).sizes()) == 3


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "no manifest", "index", "manifest"])
def test_what_is_damaged_is_refused_and_quarantine_under_a_runner(
    damage: str, location: str, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{location}/step-7"
    dcp.save(state(7), checkpoint_id=place)
    spoil(open_folder(place), damage)
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match="step-7: "):
            loaded(place)
    environment_of(monkeypatch, attempt=2)
    # It is of no run: a run moves only what it has saved itself.
    with pytest.raises(DamagedCheckpoint, match="remove it, or start from another one"):
        loaded(place)
    dcp.save(state(6), checkpoint_id=f"{location}/step-6")
    with pytest.raises(DamagedCheckpoint, match=r"it is kept as .*, and nothing starts from it"):
        loaded(place)
    assert open_folder(place).read(METADATA) is None
    assert isinstance(reports[-1], CheckpointQuarantined)


def test_a_writer_of_an_older_attempt_is_refused(
    location: str, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment_of(monkeypatch, attempt=2)
    dcp.save(state(7), checkpoint_id=f"{location}/step-7")
    environment_of(monkeypatch, attempt=1)
    with pytest.raises(Fenced, match="attempt 2 of this run has begun"):
        dcp.save(state(8), checkpoint_id=f"{location}/step-8")
    assert open_folder(f"{location}/step-8").read(METADATA) is None
    environment_of(monkeypatch, attempt=3)
    assert is_state(loaded(f"{location}/step-7"), 7)


def test_another_run_takes_the_folder_over(location: str, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attempts begin from 1 again. It may load first; once it saves, the earlier run is shut out."""
    environment_of(monkeypatch, attempt=5)
    dcp.save(state(6), checkpoint_id=f"{location}/step-6")
    environment_of(monkeypatch, attempt=1, run_id="another")
    assert is_state(loaded(f"{location}/step-6"), 6)
    environment_of(monkeypatch, attempt=5)
    dcp.save(state(7), checkpoint_id=f"{location}/step-7")
    environment_of(monkeypatch, attempt=1, run_id="another")
    assert is_state(loaded(f"{location}/step-7"), 7)
    dcp.save(state(8), checkpoint_id=f"{location}/step-8")
    environment_of(monkeypatch, attempt=5)
    with pytest.raises(CommitFailed, match="another run saves next to it"):
        dcp.save(state(9), checkpoint_id=f"{location}/step-9")
    assert open_folder(f"{location}/step-9").read(METADATA) is None
    environment_of(monkeypatch, attempt=1, run_id="another")
    assert is_state(loaded(f"{location}/step-8"), 8)


def test_what_an_older_attempt_has_not_published_is_removed(
    location: str, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(f"{location}/step-7")
    with folder.create("1.0123456789ab", "__0_0.distcp") as file:
        file.write(b"torn")
    assert folder._staged("1.0123456789ab") == {"__0_0.distcp": 4}
    environment_of(monkeypatch, attempt=2)
    dcp.save(state(7), checkpoint_id=f"{location}/step-7")
    left = (
        folder._staged("1.0123456789ab")
        if folder.tier == "remote"
        else list(Path(location.removeprefix("file://")).glob(".checkpointing/*.tmp"))
    )
    assert not left and is_state(loaded(f"{location}/step-7"), 7)


def test_what_stock_torch_has_written_is_loaded_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "step-7")
    dcp.save(state(7), checkpoint_id=place)
    commit_and_verify(monkeypatch)
    assert is_state(loaded(place), 7) and is_state(loaded(place), 7)
    assert capfd.readouterr().err.count("has no manifest: it is loaded as it is, not verified") == 1


def test_stock_torch_reads_what_was_committed(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        commit_and_verify(patch)
        dcp.save(state(7), checkpoint_id=str(tmp_path / "step-7"))
    assert is_state(loaded(str(tmp_path / "step-7")), 7)
    dcp_to_torch_save(str(tmp_path / "step-7"), str(tmp_path / "one.pt"))
    assert is_state(torch.load(tmp_path / "one.pt"), 7)


@pytest.mark.parametrize("options", [{"single_file_per_rank": False, "thread_count": 4}, {"thread_count": 2}])
def test_a_writer_of_the_programs_own_choice_commits_too(tmp_path: Path, reports: Reports, options: Any) -> None:
    place = tmp_path / "dist_epoch_3"
    writer = dcp.FileSystemWriter(place, sync_files=False, **options)
    dcp.async_save(state(3), storage_writer=writer).result()
    found = state(-1.0)
    dcp.load(found, storage_reader=dcp.FileSystemReader(place))
    assert is_state(found, 3) and [one.step for one in reports] == [3, 3]


def test_files_of_the_program_beside_the_index_stay(tmp_path: Path, reports: Reports) -> None:
    place = tmp_path / "step-1"
    place.mkdir()
    (place / "own.pt").write_bytes(b"own")
    for value in (1, 2):
        dcp.save(state(value), checkpoint_id=str(place))
    assert (place / "own.pt").read_bytes() == b"own" and is_state(loaded(str(place)), 2)


class OwnWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    """Writes in a way of its own."""

    def finish(self, metadata: Any, results: Any) -> None:
        """End as torch's does."""
        super().finish(metadata, results)


def test_a_writer_with_files_of_its_own_is_left_alone_and_named(
    tmp_path: Path, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    dcp.save(state(1), storage_writer=OwnWriter(tmp_path / "step-1"))
    assert not reports and (tmp_path / "step-1" / "__0_0.distcp").exists()
    assert "saves by OwnWriter are its own: they are not committed, nor verified" in capfd.readouterr().err
