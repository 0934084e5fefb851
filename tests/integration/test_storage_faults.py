"""Storage that fails: training continues, every failure is reported, nothing is lost, and no files are left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.servers import small_disk
from integration.support import SHORT_JOB, TOTAL_STEPS, Run, script, state_hash, wait_for_commit

from checkpointing.storage import open_storage
from runner.chaos.compare import differences

# Of a script that stands still until the test has acted.
HELD = ["--set", "restart.hang_timeout_s=600"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "20M") as mount:
        yield mount


def test_a_full_disk_ends_the_run_in_good_order_and_more_room_lets_it_go_on(
    tmp_path: Path, disk: Path, untouched_script: Run
) -> None:
    location = disk / "checkpoints"
    options = ["--set", f"checkpoint.location={location}", "--set", "checkpoint.max_failed_saves=2"]
    run = Run(tmp_path / "run", *HELD, *options, script=script(tmp_path, gate=12)).start()
    wait_for_commit(run, 10)
    filler = disk / "somebody-elses"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    (tmp_path / "hf.open").touch()
    assert run.finish() == 74, run.output
    failed = run.events("commit_failed")
    assert len(failed) >= 2 and all("No space left" in event["error"] for event in failed)
    assert "max_failed_saves" in run.events("run_ended")[0]["reason"]
    assert len(run.events("attempt_started")) == 1, "a full disk is no reason to start again"
    assert not [path.name for path in location.iterdir() if path.name.endswith(".tmp")]
    assert not run.leftovers()

    filler.unlink()
    again = Run(tmp_path / "run", *options, "--allow-changes", script=script(tmp_path)).start()
    assert again.finish() == 0, again.output
    assert state_hash(location / "checkpoint-60") == state_hash(untouched_script.checkpoint(60))


def test_a_second_runner_on_the_same_checkpoints_ends_the_first(tmp_path: Path, untouched_script: Run) -> None:
    """A pod was replaced, but the old one still lives: it must not publish, and not train on for nothing."""
    options = ["--set", f"checkpoint.location={tmp_path / 'shared'}"]
    old = Run(tmp_path / "old", *HELD, *options, script=script(tmp_path, gate=12)).start()
    wait_for_commit(old, 10)
    # What the new pod's agent does when it begins; the lock is passed over, it is of no use on a network file system.
    open_storage(str(tmp_path / "shared")).begin_attempt(2)
    (tmp_path / "hf.open").touch()
    assert old.finish() == 78, old.output
    assert "attempt 2 of this run has begun" in old.events("run_ended")[0]["reason"]
    before = {path.name for path in (tmp_path / "shared").glob("checkpoint-*")}

    new = Run(tmp_path / "new", *options, "--allow-changes", script=script(tmp_path)).start()
    assert new.finish() == 0, new.output
    assert new.events("attempt_started")[0]["attempt"] == 3
    assert before <= {path.name for path in (tmp_path / "shared").glob("checkpoint-*")}
    assert state_hash(tmp_path / "shared" / "checkpoint-60") == state_hash(untouched_script.checkpoint(60))


@pytest.mark.soak
def test_a_last_save_that_fails_is_made_good(tmp_path: Path, untouched: Run) -> None:
    """The next attempt resumes from memory with no step left: it must commit the snapshot that only memory holds."""
    temporary, fired = tmp_path / "tmp", tmp_path / "fired"
    temporary.mkdir()
    fired.mkdir()
    run = Run(tmp_path / "run", *SHORT_JOB)
    faults = "local.synced=error@4; training.step=kill@30"
    run.start(TMPDIR=str(temporary), CHECKPOINT_FAILPOINTS=faults, CHECKPOINT_FAILPOINTS_ONCE=str(fired))
    assert run.finish() == 0, run.output
    assert run.events("commit_failed")[0]["step"] == TOTAL_STEPS, "the fourth commit is the last one's"
    assert run.events("resumed")[-1]["step"] == TOTAL_STEPS
    assert run.events("committed")[-1]["step"] == TOTAL_STEPS
    # Every file, also what the Trainer counts between two saves.
    assert differences(untouched.checkpoint(TOTAL_STEPS), run.checkpoint(TOTAL_STEPS)) == []
    caches = {path for path in temporary.iterdir() if path.name.startswith("torchinductor")}
    assert set(temporary.iterdir()) == caches, "what killed ranks leave goes with the runner"
