"""What the doctor says that a start would do; the decisions themselves are those of the start."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.journals import event

from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.host import locking
from runner.config.schema import Config
from runner.doctor import start_checks
from runner.doctor.findings import Finding, Level
from runner.doctor.start_checks import check_processes, check_start, describe
from runner.journal.attempts import Job
from runner.journal.journal import Journal
from runner.program.nested_launchers import unnested
from runner.program.program import Program, find_program
from runner.session.identity import identify
from runner.session.preflight import StartRequest, admit


class Desk:
    """A script with its folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "train.py"
        self.script.write_text("")

    def asked(
        self, *args: str, step: str | int = "auto", overwrite: bool = False, start_from: str = "", **config: Any
    ) -> StartRequest:
        document = {"output_dir": str(self.folder / "run"), **config}
        job = Job(Program("script", str(self.script), args), resume_from=start_from)
        return StartRequest(Config.model_validate(document), job, step, overwrite)

    def find(self, *args: str, **options: Any) -> list[Finding]:
        before = tree(self.folder)
        found = list(check_start(self.asked(*args, **options)))
        assert tree(self.folder) == before, "nothing is made or changed"
        return found

    def run(self, *steps: int, state: str | None = None) -> None:
        """Have a run of the script without arguments here, with checkpoints of these steps."""
        asked = self.asked()
        asked.directory.create()
        place = admit(asked.config, asked.directory, identify(asked.config, asked.job.program))
        journal = Journal(asked.directory.journal, time.time)
        journal.append(event("run_started", run_id="r", place=place, location=asked.config.checkpoint_location), 1)
        storage = asked.config.tiers.durable
        storage.begin_attempt(1)
        for step in steps:
            staged = StagedFile("a", [memoryview(b"abc")], lambda: digest_buffer(b"abc"))
            commit_snapshot(storage, SnapshotInfo("r", 1, step, 2, step * 8), [staged])
        if state is not None:
            journal.append(event("run_ended", state=state, exit_code=0), 1)
        journal.close()


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_new_run(desk: Desk) -> None:
    assert desk.find() == [Finding(Level.OK, "start", "would begin a new run")]
    assert desk.find(start_from="/data/checkpoint-9")[0].text == "would begin from /data/checkpoint-9"


def test_the_same_job_resumes(desk: Desk) -> None:
    desk.run(10, 20)
    assert desk.find() == [Finding(Level.OK, "start", "would resume from step 20, the newest of 2 checkpoints")]
    assert desk.find(step=10)[0].text.startswith("would resume from step 10, and keep newer")
    [found] = desk.find(step=15)
    assert found.level is Level.FAIL and "--resume 15: " in found.text and "committed steps: 10, 20" in found.text


def test_another_job_is_refused_with_the_text_of_the_start(desk: Desk) -> None:
    desk.run(10)
    [found] = desk.find("--lr", "2")
    assert found.level is Level.FAIL and found.fix
    assert found.text.startswith(f"would be refused: {desk.folder}/run") and "of another job (--lr" in found.text


def test_a_run_that_is_finished(desk: Desk) -> None:
    desk.run(10, state="finished")
    [found] = desk.find()
    assert found.level is Level.WARN and "a start has nothing to do" in found.text
    assert "would resume from step 10" in desk.find(step=10)[0].text


def test_a_new_run_in_the_folder_of_an_earlier_one(desk: Desk) -> None:
    desk.run(10)
    [found] = desk.find(step="never")
    assert found.level is Level.FAIL and "already contains a run; add --overwrite" in found.text
    notes = desk.find(step="never", overwrite=True)
    assert [one.level for one in notes] == [Level.WARN, Level.OK]
    assert "moved aside" in notes[0].text and notes[1].text == "would begin a new run"


def test_checkpoints_that_are_gone(desk: Desk) -> None:
    desk.run(10)
    journal = Journal(desk.asked().directory.journal, time.time)
    journal.append(event("committed", step=10, tier="local"), 1)
    journal.close()
    [found] = desk.find(checkpoint={"location": str(desk.folder / "elsewhere")})
    assert found.level is Level.FAIL and "holds no checkpoint" in found.text and found.fix == "restore the location"


@pytest.mark.parametrize("where", ["folder", "location"])
def test_another_runner_at_work(where: str, desk: Desk) -> None:
    desk.run(10)
    asked = desk.asked()
    path = (
        asked.directory.lock_path if where == "folder" else Path(asked.config.checkpoint_location, ".supervisor.lock")
    )
    fd = locking.open_lock(path)
    assert locking.try_lock(fd)
    [found] = desk.find()
    assert found.level is Level.FAIL and f"another runner (pid {os.getpid()} on " in found.text
    os.close(fd)
    assert desk.find()[0].level is Level.OK


def test_a_node_that_follows_decides_nothing(desk: Desk) -> None:
    desk.run(10)
    launch = {"nnodes": 2, "node_rank": 1, "rdzv_endpoint": "127.0.0.1:29500"}
    [found] = desk.find("--lr", "2", launch=launch)
    assert found.level is Level.OK and "node 1 follows" in found.text


def test_a_secret_that_is_not_set(desk: Desk) -> None:
    [found] = desk.find(notify={"url": "http://127.0.0.1:1/t0ken", "secret_env": "NOT_SET_HERE"})
    assert found.level is Level.FAIL and "NOT_SET_HERE" in found.text and "t0ken" not in found.text


@pytest.mark.parametrize(
    ("room", "level"), [(float("inf"), Level.OK), (96, Level.OK), (95, Level.WARN), (24, Level.WARN), (23, Level.FAIL)]
)
def test_processes(room: float, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "room_for_processes", lambda: room)
    monkeypatch.setattr("checkpointing.host.limits.room_for_processes", lambda: room)
    [found] = check_processes(2)
    assert found.level is level and found.subject == "processes"


def test_what_would_be_run(desk: Desk) -> None:
    program = find_program(str(desk.script), [])
    assert program is not None
    [found] = describe(desk.asked(), unnested(program, {}), 1, 1)
    assert found.text == (
        f"script train.py, 1 rank on 1 node, output in {desk.folder}/run, checkpoints at {desk.folder}/run/checkpoints"
    )
    [found] = describe(StartRequest(desk.asked().config, Job()), None, 2, 4)
    assert found.text.startswith("the configured job (data: the bundled data), 8 ranks on 2 nodes")


def test_a_launcher_in_the_command_line_is_named(desk: Desk) -> None:
    program = find_program("torchrun", ["--nproc-per-node", "4", str(desk.script), "--lr", "1"])
    assert program is not None
    nested = unnested(program, {})
    found = list(describe(desk.asked(), nested, 1, 4))
    assert found[0].text.startswith("script train.py, 4 ranks")
    assert found[1].text == "the launcher starts no ranks of its own; taken over: --nproc_per_node 4"


def test_variables_that_libraries_read_on_import(desk: Desk) -> None:
    desk.script.write_text("import os\nos.environ['HF_HOME'] = '1'\n")
    program = find_program(str(desk.script), [])
    assert program is not None
    found = list(describe(desk.asked(), unnested(program, {}), 1, 1))
    assert [one.level for one in found] == [Level.OK, Level.WARN] and "HF_HOME" in found[1].text
