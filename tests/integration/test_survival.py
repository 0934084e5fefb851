"""Kill a run in every way and see it finish as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.support import (
    RUNNER,
    SAVE_STEPS,
    SHORT_JOB,
    TOTAL_STEPS,
    Run,
    loss_curve,
    script,
    state_hash,
    wait_for_commit,
    wait_until,
)


def assert_equal_end(run: Run, untouched: Run) -> None:
    assert state_hash(run.checkpoint(TOTAL_STEPS)) == state_hash(untouched.checkpoint(TOTAL_STEPS))
    assert loss_curve(run.checkpoint(TOTAL_STEPS)) == loss_curve(untouched.checkpoint(TOTAL_STEPS))


def test_loss_falls_and_the_summary_tells(untouched: Run) -> None:
    losses = [loss for _, loss in loss_curve(untouched.checkpoint(TOTAL_STEPS))]
    assert losses[-1] < losses[0] - 1.0
    for text in (
        "finished",
        f"{TOTAL_STEPS} of {TOTAL_STEPS}",
        "attempts     1",
        "lost work    0 steps",
        "best_model",
    ):
        assert text in untouched.output
    assert not untouched.leftovers()


@pytest.mark.parametrize(
    "victim", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("rank 1", "launcher")), "rank 0", "agent"]
)
def test_sigkill_between_two_checkpoints(victim: str, untouched: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB).start_held(2 * SAVE_STEPS + 6)
    step = run.wait_for_step(2 * SAVE_STEPS + 5)
    wait_for_commit(run, 2 * SAVE_STEPS)
    pid = {
        "rank 1": lambda: run.rank_pid(1),
        "rank 0": lambda: run.rank_pid(0),
        "launcher": run.launcher_pid,
        "agent": run.agent_pid,
    }[victim]()
    os.kill(pid, signal.SIGKILL)
    assert run.finish() == 0, run.output

    assert_equal_end(run, untouched)
    first = run.events("attempt_ended")[0]
    resumed = run.events("training_started")[1]["step"]
    assert len(run.events("attempt_started")) == 2
    # By default a snapshot in memory between two commits falls due by time, so the run may resume from one that is
    # newer than the commit.
    assert step <= first["step"] <= step + 1 and resumed == run.events("resumed")[-1]["step"]
    assert resumed >= first["committed_step"] >= 2 * SAVE_STEPS
    lost = first["step"] - resumed
    assert 0 <= lost <= SAVE_STEPS
    assert f"lost work    {lost} steps" in run.output
    if victim.startswith("rank"):
        assert first["rank"] == int(victim[-1])
        assert "SIGKILL" in first["cause"] or "killed" in first["cause"]
    assert not run.leftovers()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="short-", dir="/tmp") as folder:
        yield Path(folder)


def test_sigkill_of_the_supervisor_then_the_same_command(untouched: Run, tmp_path: Path, temporary: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB).start_held(2 * SAVE_STEPS + 6, TMPDIR=str(temporary))
    run.wait_for_step(2 * SAVE_STEPS + 5)
    wait_for_commit(run, 2 * SAVE_STEPS)
    first_life = {process.pid for process in run.processes()}
    assert len(first_life) >= 4
    run.signal(signal.SIGKILL)
    run.finish()
    (left,) = temporary.glob("runner-*")

    assert run.start(TMPDIR=str(temporary)).finish() == 0, run.output
    assert not left.exists() and not [*temporary.glob("runner-*")]
    assert_equal_end(run, untouched)
    assert run.events("training_started")[1]["step"] >= 2 * SAVE_STEPS
    assert not first_life & {process.pid for process in run.processes()}
    assert not run.leftovers()


def test_ctrl_c_commits_a_snapshot_and_the_same_command_goes_on(untouched_script: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", script=script(tmp_path, crawl=18)).start()
    wait_for_commit(run, 20)
    began = time.monotonic()
    # A terminal's Ctrl-C reaches the whole foreground process group.
    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish() == 75, run.output
    assert time.monotonic() - began < 120

    stopped_at = run.events("attempt_ended")[-1]["step"]
    assert 20 <= stopped_at < 60
    assert run.events("committed")[-1]["step"] == stopped_at
    assert not run.leftovers()
    assert run.start().finish() == 0, run.output
    assert run.events("training_started")[-1]["step"] == stopped_at
    assert "lost work    0 steps" in run.output
    assert state_hash(run.checkpoint(60)) == state_hash(untouched_script.checkpoint(60))
    assert loss_curve(run.checkpoint(60)) == loss_curve(untouched_script.checkpoint(60))


@pytest.mark.soak
def test_stop_during_start_up_ends_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB).start()
    wait_until(run, lambda: run.events("run_started"))
    time.sleep(0.5)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert not run.leftovers()


def test_a_finished_run_is_not_run_again(untouched: Run) -> None:
    again = Run(untouched.folder, *SHORT_JOB).start()
    assert again.finish() == 0
    assert "finished; nothing to do" in again.output


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUNNER, *arguments], capture_output=True, text=True, timeout=400)


def test_status_and_checkpoint_commands(untouched: Run) -> None:
    folder = str(untouched.folder)
    status = command("status", folder, "--json")
    run = json.loads(status.stdout)
    assert (run["state"], run["step"], run["committed"]) == ("finished", TOTAL_STEPS, [20, 40, 60, 70])
    assert abs(sum(run["time_by_cause"].values()) - run["wall_s"]) < 0.01
    events = untouched.events()
    assert abs(run["wall_s"] - (events[-1]["time"] - events[0]["time"])) < 0.01
    assert "finished" in command("status", folder).stdout

    listed = command("checkpoints", "list", folder)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["step", "70", "60", "40", "20"]
    verified = command("checkpoints", "verify", folder)
    assert verified.returncode == 0 and verified.stdout.count(" ok ") == 4


def test_a_second_runner_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB).start_held(5)
    wait_until(run, lambda: run.events("run_started"))
    second = Run(tmp_path / "run", *SHORT_JOB).start()
    assert second.finish() == 2
    assert "another runner" in second.output and "Traceback" not in second.output
    run.end()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB).start_held(8)
    run.wait_for_step(5)
    began = time.monotonic()
    run.signal(signal.SIGTERM)
    # Another one at once might be the same notice, or never be delivered.
    wait_until(run, lambda: run.events("stop_requested"))
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    # The grace is a minute.
    assert time.monotonic() - began < 50
    assert run.events("attempt_ended")[-1]["kind"] == "ended at once"
    assert not run.leftovers()


@pytest.mark.soak
def test_a_stop_during_backoff_is_honoured(tmp_path: Path) -> None:
    options = [*SHORT_JOB, "--set", "restart.backoff_initial_s=600", "--set", "restart.backoff_max_s=600"]
    run = Run(tmp_path / "run", *options).start(CHECKPOINT_FAILPOINTS="training.step=kill@7")
    # The first time it starts again at once.
    wait_until(run, lambda: any(event["delay_s"] >= 600 for event in run.events("backoff")))
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert not run.leftovers()


@pytest.mark.soak
def test_nobody_needs_to_listen(tmp_path: Path) -> None:
    """`runner start | head -1`: the reader goes away, the run goes on."""
    run = Run(tmp_path / "run", "--set", "trainer.max_steps=8").start()
    assert run.process is not None and run.process.stdout is not None
    run.process.stdout.readline()
    run.process.stdout.close()
    assert run.process.wait(500) == 0
    assert run.events("run_ended")[-1]["state"] == "finished"
