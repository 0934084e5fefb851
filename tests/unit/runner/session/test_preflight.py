"""What is checked before a run is started."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import event

from checkpointing.commit.tiers import Tiers
from checkpointing.host import locking
from checkpointing.storage import LocalStorage, open_storage
from runner.config.schema import Config
from runner.errors import CheckpointsMissing, RunBusy, StorageFailed, StorageFull, UsageError
from runner.journal.journal import Journal, read_journal
from runner.journal.run_directory import RunDirectory
from runner.recovery.restart_state import RestartState, RunnerProcess
from runner.session import preflight
from runner.session.identity import JobIdentity, identify
from runner.session.location_id import ensure_id, read_id
from runner.session.preflight import (
    LocationLock,
    admit,
    await_storage,
    examine,
    is_done,
    recorded_in,
    starting_point,
    was_in_use,
)


class Fixture:
    """A run's folder with its journal, and one checkpoint that is not whole (which counts as one)."""

    def __init__(self, folder: Path, **trainer: Any) -> None:
        self.config = Config.model_validate(
            {"output_dir": str(folder / "run"), "model": {"name_or_path": "org/model"}, "trainer": trainer}
        )
        self.directory = RunDirectory(self.config.output_dir)
        self.directory.create()

    @property
    def job(self) -> JobIdentity:
        return identify(self.config)

    @property
    def location(self) -> Path:
        return Path(self.config.checkpoint_location)

    def start(self) -> None:
        place = admit(self.config, self.directory, self.job)
        self.record("run_started", run_id="r", place=place, location=str(self.location))

    def save(self, step: int = 5) -> None:
        (self.location / f"checkpoint-{step}").mkdir(parents=True)

    def record(self, name: str, **details: Any) -> None:
        journal = Journal(self.directory.journal, time.time)
        journal.append(event(name, **details), 1)
        journal.close()

    def examine(self, *, allow_changes: bool = False, **trainer: Any) -> list[str]:
        self.config.trainer = trainer
        return examine(self.config, self.directory, self.job, allow_changes=allow_changes)


def test_the_same_job_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    run = Fixture(tmp_path, seed=1)
    assert run.examine(seed=1) == []
    run.start()
    # Nothing was committed: it is simply replaced.
    assert run.examine(seed=2) == []
    run.save()
    assert run.examine(seed=1, max_steps=90) == []
    before = [(path, path.read_bytes()) for path in tmp_path.rglob("*.json")]
    with pytest.raises(UsageError) as error:
        run.examine(seed=2)
    text = str(error.value)
    for part in (str(run.location), "(trainer.seed: 1 -> 2)", "--output-dir", "--overwrite", "--allow-changes"):
        assert part in text
    assert "\n" not in text and before == [(path, path.read_bytes()) for path, _ in before]


def test_changes_may_be_allowed_and_are_then_the_job(tmp_path: Path) -> None:
    run = Fixture(tmp_path, seed=1)
    run.start()
    run.save()
    (note,) = run.examine(seed=2, allow_changes=True)
    assert "(trainer.seed: 1 -> 2)" in note
    run.start()
    assert run.examine(seed=2) == []
    with pytest.raises(UsageError, match=r"trainer\.seed: 2 -> 1"):
        run.examine(seed=1)


def test_a_new_machine_learns_the_job_at_the_location(tmp_path: Path) -> None:
    run = Fixture(tmp_path / "old", seed=1)
    run.start()
    run.save()
    other = Fixture(tmp_path / "new")
    other.config.checkpoint.location = str(run.location)
    assert other.examine(seed=1) == []
    with pytest.raises(UsageError, match=r"trainer\.seed: 1 -> 2"):
        other.examine(seed=2)


def test_the_folder_tells_the_job_where_the_location_does_not(tmp_path: Path) -> None:
    run = Fixture(tmp_path, seed=1)
    run.start()
    run.save()
    (run.location / ".records" / "job.json").unlink()
    with pytest.raises(UsageError, match=r"trainer\.seed: 1 -> 2"):
        run.examine(seed=2)


def test_a_local_tier_keeps_the_job_too(tmp_path: Path) -> None:
    run = Fixture(tmp_path / "old", seed=1)
    run.config.checkpoint.local_tier = str(tmp_path / "fast")
    run.start()
    (tmp_path / "fast" / "checkpoint-5").mkdir()
    other = Fixture(tmp_path / "new")
    other.config.checkpoint.local_tier = str(tmp_path / "fast")
    with pytest.raises(UsageError, match=r"trainer\.seed: 1 -> 2"):
        other.examine(seed=2)


@pytest.mark.parametrize("record", [None, b"{", b"[]"])
def test_checkpoints_of_an_older_version_are_taken_as_they_are(record: bytes | None, tmp_path: Path) -> None:
    run = Fixture(tmp_path)
    run.save()
    if record is not None:
        LocalStorage(run.location).sidecars.write("job.json", record)
    assert run.examine(seed=2) == []
    run.start()
    with pytest.raises(UsageError, match=r"trainer\.seed: 2 -> 1"):
        run.examine(seed=1)


def test_results_without_checkpoints_are_of_a_job_too(tmp_path: Path) -> None:
    """A script that does not use our checkpoints has finished in this folder."""
    run = Fixture(tmp_path, seed=1)
    run.start()
    run.record("run_ended", state="failed", exit_code=78)
    assert run.examine(seed=2) == []
    run.config.trainer = {"seed": 1}
    run.record("run_ended", state="finished", exit_code=0)
    with pytest.raises(UsageError, match=rf"{run.directory.root} holds .*trainer\.seed: 1 -> 2"):
        run.examine(seed=2)


def test_a_finished_run_is_done_only_for_the_same_job_and_length(tmp_path: Path) -> None:
    run = Fixture(tmp_path, max_steps=60)

    def done(**trainer: Any) -> bool:
        run.config.trainer = trainer
        return is_done(run.config, run.directory, run.job)

    assert not done(max_steps=60)
    run.start()
    assert not done(max_steps=60)
    run.record("run_ended", state="finished", exit_code=0)
    assert done(max_steps=60)
    assert not done(max_steps=80) and not done(max_steps=60, seed=2)
    run.config.checkpoint.location = str(tmp_path / "elsewhere")
    assert not done(max_steps=60)
    run.config.checkpoint.location = None
    run.directory.job.unlink()
    assert not done(max_steps=60), "an older version has not written down what it was"


def test_a_location_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    run = Fixture(tmp_path)
    run.start()
    run.record("committed", step=5, tier="local")
    run.save()
    assert run.examine() == []
    run.location.rename(tmp_path / "away")
    with pytest.raises(CheckpointsMissing, match=r"holds no checkpoint, .* step 5 was committed"):
        run.examine()
    # Another volume: with an id, and somebody's checkpoints.
    run.save(3)
    ensure_id(LocalStorage(run.location))
    with pytest.raises(CheckpointsMissing, match="is another location and does not hold step 5"):
        run.examine()


def test_what_is_written_down_is_read_again(tmp_path: Path) -> None:
    run = Fixture(tmp_path, seed=1)
    place = admit(run.config, run.directory, run.job)
    assert admit(run.config, run.directory, run.job) == place == read_id(LocalStorage(run.location))
    assert recorded_in(run.directory) == run.job
    assert not list(tmp_path.rglob("*.tmp"))


# -- who works there ---------------------------------------------------------------------------------------------------


def test_one_runner_at_a_location(tmp_path: Path) -> None:
    config = Fixture(tmp_path).config
    told: list[str] = []
    first = LocationLock(config, told.append)
    first.hold()
    with pytest.raises(RunBusy, match=r"another runner \(pid \d+ on .*\) keeps its checkpoints at .*checkpoints; stop"):
        LocationLock(config, told.append).hold()
    # Once the folder was moved away, a new one is locked.
    Path(config.checkpoint_location).rename(tmp_path / "aside")
    first.hold()
    with pytest.raises(RunBusy):
        LocationLock(config, told.append).hold()
    first.hold()
    assert not told


def test_a_runner_of_another_machine_is_waited_for_and_left_to_the_fence(tmp_path: Path) -> None:
    config = Fixture(tmp_path).config
    first = LocationLock(config, print)
    first.hold()
    (Path(config.checkpoint_location) / preflight.LOCK_NAME).write_text("pid 7 on another-machine\n")
    told: list[str] = []
    began = time.monotonic()
    LocationLock(config, told.append, patience_s=0.3).hold()
    assert time.monotonic() - began >= 0.3
    assert "(pid 7 on another-machine) keeps its checkpoints at" in told[0] and "continuing" in told[1]


@pytest.mark.parametrize(
    ("change", "is_busy"),
    [
        ({}, True),
        ({"host": "another-machine (boot 1)"}, False),
        ({"started": 1}, False),
        ({"pid": 2**22 + 1}, False),
        ({"pid": 0}, False),
        ({"pid": "x"}, False),
    ],
)
def test_object_storage_knows_its_runner_by_the_note(
    change: dict[str, Any], is_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Fixture(tmp_path).config
    config.checkpoint.location = f"memory://{tmp_path.name}-{os.getpid()}/run"
    storage = open_storage(config.checkpoint.location)
    LocationLock(config, print).hold()
    # A living process that is not this one: pytest's parent.
    note = {"attempt": 1, "runner": {**runner_of(os.getppid()), **change}}
    storage.sidecars.write_restart_state(json.dumps(note).encode())
    if is_busy:
        with pytest.raises(
            RunBusy, match=rf"another runner \(pid {os.getppid()} on .* keeps its checkpoints at memory"
        ):
            LocationLock(config, print).hold()
    else:
        LocationLock(config, print).hold()
    assert storage.sidecars.read_restart_state() == json.dumps(note).encode()


def runner_of(pid: int) -> dict[str, Any]:
    from runner.system import processes

    return {"host": locking.this_machine(), "pid": pid, "started": processes.start_ticks(pid)}


def test_a_runner_is_not_refused_for_its_own_note() -> None:
    own = RunnerProcess.current()
    assert own.pid == os.getpid() and own.started > 0 and not own.is_alive_here
    record = RestartState(runner=own)
    assert RestartState.from_json(record.to_json(1)) == record


# -- where to start from -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin.index.json", "trainer_state.json"])
def test_a_checkpoint_is_a_starting_point(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / file).write_bytes(b"x")
    assert starting_point("checkpoint-5") == str(folder)


def test_anything_else_is_no_starting_point(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--resume-from 'nowhere': no such folder; give the folder"):
        starting_point("nowhere")
    with pytest.raises(UsageError, match=r"it holds no model weights and no trainer_state\.json; give a checkpoint's"):
        starting_point(str(tmp_path))
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(UsageError, match=r"give one of the checkpoints in it, such as .*checkpoint-10$"):
        starting_point(str(tmp_path))


def test_the_tiers_are_all_written_to(tmp_path: Path) -> None:
    run = Fixture(tmp_path)
    run.config.checkpoint.local_tier = str(tmp_path / "fast")
    run.start()
    tiers: Tiers = run.config.tiers
    assert {storage.sidecars.read("job.json") for storage in tiers.nearest_first} == {run.job.to_json()}
    assert read_journal(run.directory.journal)[0].event.to_dict()["place"] == read_id(tiers.durable)


class Waiting:
    """Time, which passes while it is waited."""

    def __init__(self, try_s: float = 0.0) -> None:
        self.now, self.waited, self.said = 0.0, list[float](), list[str]()
        self._try_s = try_s

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds + self._try_s

    def await_storage(self, config: Config, *, follows: bool = False) -> tuple[list[str], bool]:
        options: Any = {"wait": self.wait, "clock": lambda: self.now}
        return await_storage(config, self.said.append, patience_s=60, follows=follows, **options)


READ_ONLY, FULL = OSError(errno.EROFS, "Read-only file system"), OSError(errno.ENOSPC, "No space left on device")


def test_storage_that_was_in_use_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that had begun to lead ended with 2: found by `runner chaos --nodes 3 --seed 23009`."""
    config, waiting = Fixture(tmp_path).config, Waiting()
    # Credentials of a run that goes on may be about to be renewed.
    denied = PermissionError(errno.EACCES, "Permission denied")
    probe_answers(monkeypatch, [READ_ONLY, FULL, denied, None])
    assert waiting.await_storage(config, follows=True) == ([], False)
    assert len(waiting.said) == 1 and waiting.waited == [1.0, 1.0, 1.0]
    assert waiting.said[0].endswith("Read-only file system; start again when that works; trying again for 60 s")


@pytest.mark.parametrize(("try_s", "tries"), [(0.0, 61), (59.0, 2)])
def test_the_wait_for_storage_has_an_end(
    try_s: float, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try of a server that is away takes a minute."""
    waiting, answers = Waiting(try_s), [READ_ONLY] * 100
    probe_answers(monkeypatch, answers)
    with pytest.raises(StorageFailed, match="Read-only file system"):
        waiting.await_storage(Fixture(tmp_path).config)
    assert len(answers) == 100 - tries


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), UsageError),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), UsageError),
        (OSError(errno.ENAMETOOLONG, "File name too long"), UsageError),
        (FULL, StorageFull),
    ],
)
def test_what_does_not_pass_is_not_waited_for(
    error: OSError, what: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_answers(monkeypatch, [error])
    waiting = Waiting()
    with pytest.raises(what, match=str(error.strerror)):
        waiting.await_storage(Fixture(tmp_path).config)
    assert not waiting.waited


def probe_answers(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    """What each try of a location meets."""

    def probe(_: object) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(LocalStorage, "probe", probe)


def test_a_location_was_in_use_where_the_last_start_had_it(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    assert not was_in_use(fixture.config, fixture.directory)
    fixture.config.make_absolute()
    fixture.directory.write_config(fixture.config.to_yaml())
    assert was_in_use(fixture.config, fixture.directory)
    fixture.config.checkpoint.local_tier = str(tmp_path / "nearer")
    assert not was_in_use(fixture.config, fixture.directory)
    fixture.config.checkpoint.local_tier = None
    fixture.config.checkpoint.location = str(tmp_path / "elsewhere")
    assert not was_in_use(fixture.config, fixture.directory)
    fixture.directory.config.write_text("{")
    assert not was_in_use(fixture.config, fixture.directory)
