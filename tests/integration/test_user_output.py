"""What a user's own script prints, and what a failure of it looks like on the console."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.journals import event
from helpers.servers import small_disk
from integration.support import RUNNER, SHORT_JOB, Run, wait_until

from runner.journal.events import RunEnded
from runner.journal.journal import Journal, read_journal
from runner.journal.run_directory import RunDirectory

BUG = """
def load(path):
    raise ValueError("bad thing in " + path)

import atexit
atexit.register(print, "goodbye")
print("hello")
load("rows.json")
"""
BAR = """
import sys
for percent in range(0, 101, 20):
    print(f"\\r{percent} %", end="", file=sys.stderr, flush=True)
print(file=sys.stderr)
print("fait accompli \\u2713")
"""
LOOP = """
import sys, torch
from checkpointing import CheckpointManager
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager(sys.argv[1], model=model, optimizer=optimizer, save_steps=20)
for step in range(manager.resume(total_steps=int(sys.argv[2])), int(sys.argv[2])):
    loss = model(torch.ones(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step + 1, metrics={"loss": loss.item()})
manager.close()
"""
HICCUP = """
import pathlib
calls = pathlib.Path(CALLS)
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if len(calls.read_text()) <= 2:
    raise ConnectionError("Couldn't reach 'user/set' on the Hub (503)")
print("trained")
"""


def start(
    folder: Path, text: str, *options: str, name: str = "run", **popen: object
) -> subprocess.CompletedProcess[bytes]:
    (folder / "train.py").write_text(text)
    command = [*RUNNER, "start", "--nproc-per-node", "1", "--output-dir", str(folder / name), *options]
    streams: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
    return subprocess.run([*command, str(folder / "train.py")], stdin=subprocess.DEVNULL, timeout=300, **streams)  # type: ignore[call-overload,no-any-return]


def test_a_bug_shows_its_traceback_then_one_line(tmp_path: Path) -> None:
    """The console had one line and stderr.log nothing; the verdict came three times."""
    ended = start(tmp_path, BUG)
    out, err = ended.stdout.decode(), ended.stderr.decode()
    assert ended.returncode == 78
    traceback = err[err.index("Traceback (most recent call last):") :]
    assert traceback.startswith(
        f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 8, in <module>'
    )
    assert traceback.endswith("ValueError: bad thing in rows.json\n") and "runner/" not in traceback
    (log,) = (tmp_path / "run" / "logs").rglob("stderr.log")
    assert log.read_text() == traceback
    assert "\nhello\n" in out and "\ngoodbye\n" in out
    assert (out + err).count("bad thing in rows.json") == 2
    verdict = out.splitlines()[-1]
    assert verdict == (
        "runner: failed: rank 0: ValueError: bad thing in rows.json; failed before the first step, not retried "
        f"(exit code 78; log: {log})"
    )


@pytest.mark.soak
def test_the_text_of_a_system_exit_is_kept(tmp_path: Path) -> None:
    ended = start(tmp_path, 'raise SystemExit("no rows in /data; give --data")')
    assert ended.returncode == 78
    assert b"rank 0: no rows in /data; give --data; failed before the first step" in ended.stdout.splitlines()[-1]
    assert b"no rows in /data; give --data\n" in ended.stderr


def test_output_is_passed_on_as_it_is(tmp_path: Path) -> None:
    ended = start(tmp_path, BAR)
    assert ended.returncode == 0, ended.stdout
    assert b"\r0 %\r20 %\r40 %\r60 %\r80 %\r100 %\n" in ended.stderr
    assert "\nfait accompli ✓\n".encode() in ended.stdout and b"[rank" not in ended.stdout


def test_a_server_that_does_not_answer_for_a_while_does_not_end_the_job(tmp_path: Path) -> None:
    """It was a boot failure: 78, which Kubernetes takes for good."""
    text = HICCUP.replace("CALLS", repr(str(tmp_path / "calls")))
    run = Run(tmp_path / "run", "--nproc-per-node", "1", "--set", "restart.backoff_initial_s=0.2")
    (tmp_path / "train.py").write_text(text)
    run.command.append(str(tmp_path / "train.py"))
    assert run.start().finish() == 0, run.output
    assert [event["kind"] for event in run.events("attempt_ended")] == ["network failure"] * 2 + ["finished"]
    assert [event["delay_s"] >= 0.2 for event in run.events("backoff")] == [True, True]


@pytest.mark.parametrize("stdout", ["/dev/full", pytest.param("closed", marks=pytest.mark.soak)])
def test_a_console_that_takes_nothing_ends_no_run(tmp_path: Path, stdout: str) -> None:
    """What it prints is lost, the run is not; also in an encoding that lacks some of the characters."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    if stdout == "/dev/full":
        with Path("/dev/full").open("wb") as full:
            ended = start(tmp_path, "print(1)", name="läuft", stdout=full, env=environment)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        ended = start(tmp_path, "print(1)", name="läuft", stdout=writer, env=environment)
        os.close(writer)
    assert ended.returncode == 0, ended.stderr
    assert b"Traceback" not in ended.stderr and b"Exception ignored" not in ended.stderr
    told = b"cannot write standard output: No space left on device"
    assert ended.stderr.count(told) == (stdout == "/dev/full")
    found = [entry.event for entry in read_journal(RunDirectory(str(tmp_path / "läuft"), 0).journal)]
    assert [one.exit_code for one in found if isinstance(one, RunEnded)] == [0]


def test_status_ends_with_one_line_where_it_cannot_be_written(tmp_path: Path) -> None:
    """It has an arrow between two losses, which not every terminal can show."""
    journal = Journal(tmp_path / "journal.jsonl", time.time)
    journal.append(event("run_started", run_id="r", pid=1, committed_step=-1), 1)
    journal.append(event("attempt_started", nnodes=1), 1)
    journal.append(event("training_started", step=0, total_steps=9), 1)
    for step in (1, 2):
        journal.append(event("log", step=step, loss=1.0 / step), 1)
    journal.append(event("run_ended", state="finished", exit_code=0, reason="all ranks finished"), 1)
    journal.close()
    command = [*RUNNER, "status", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    plain = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert plain.returncode == 0 and "Traceback" not in plain.stderr and "1.0000 ? 0.5000" in plain.stdout
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert ended.returncode == 74
    assert ended.stderr == "runner: error: cannot write standard output: No space left on device\n"


@pytest.mark.soak
def test_an_own_loop_is_seen_and_says_where_it_resumes(tmp_path: Path) -> None:
    """Its status said steps 0; under plain python nothing said that it had been resumed."""
    (tmp_path / "loop.py").write_text(LOOP)
    script = [str(tmp_path / "loop.py"), str(tmp_path / "own"), "40"]
    subprocess.run([sys.executable, *script[:2], "20"], check=True, timeout=200)
    run = Run(tmp_path / "run", "--nproc-per-node", "1", script=script)
    assert run.start().finish() == 0, run.output
    status = json.loads(subprocess.check_output([*RUNNER, "status", str(run.folder), "--json"]))
    assert (status["step"], status["total_steps"]) == (40, 40) and 0 < status["last_loss"] < 10
    assert status["goodput"] > 0
    where = f"checkpoints are kept at {run.folder}/checkpoints, not at {tmp_path}/own, as this runs under a supervisor"
    assert run.output.count(where) == 1
    left = (
        f"{tmp_path}/own holds checkpoints up to step 20, from which this run does not resume; for that, runner start"
    )
    assert left in run.output

    plain = [sys.executable, str(tmp_path / "loop.py"), str(run.folder / "checkpoints"), "60"]
    ended = subprocess.run(plain, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert f"checkpointing: resumed from step 40 ({run.folder}/checkpoints/checkpoint-40)" in ended.stderr


@pytest.mark.parametrize("size", [pytest.param("200k", marks=pytest.mark.soak), "1200k"])
def test_a_full_output_folder_is_named_and_ends_with_74(tmp_path: Path, size: str) -> None:
    """945 lines, "died without an error message", and a code that the journal did not know."""
    with small_disk(tmp_path / "volume", size) as folder:
        run = Run(folder / "run", *SHORT_JOB, "--nproc-per-node", "2")
        assert run.start().finish() == 74, run.output
        assert "Traceback" not in run.output and len(run.output.splitlines()) < 40, run.output
        verdict = run.output.splitlines()[-1]
        assert "No space left on device" in verdict and "; make room, then start again (exit code 74" in verdict
        assert [event["exit_code"] for event in run.events("run_ended")] == [74]


@pytest.mark.soak
def test_an_output_folder_that_is_moved_away_is_named(tmp_path: Path) -> None:
    job = ["trainer.num_train_epochs=9", "trainer.save_steps=10", "checkpoint.max_failed_saves=1"]
    run = Run(tmp_path / "run", *(part for setting in job for part in ("--set", setting))).start()
    wait_until(run, run.checkpoint(10).exists)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run.finish() == 74 and "Traceback" not in run.output, run.output
    verdict = run.output.splitlines()[-1]
    assert "existed when attempt" in verdict and "put it back (exit code 74" in verdict
    assert not (tmp_path / "run").exists()
    assert '"exit_code": 74' in (tmp_path / "moved" / "journal.jsonl").read_text().splitlines()[-1]


@pytest.mark.soak
def test_a_script_that_saves_nothing_is_told_so(tmp_path: Path) -> None:
    text = (
        "import os, signal\nfrom checkpointing.host.environment import rank_settings\n"
        "if rank_settings().attempt == 1:\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = start(tmp_path, text)
    assert ended.returncode == 0
    assert ended.stdout.count(b"has used neither resilient() nor a CheckpointManager: nothing is saved") == 1
