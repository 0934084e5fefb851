"""What a run says of itself, from wherever one asks."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import Server, bucket_on
from integration.support import RUNNER, SHORT_JOB, TOTAL_STEPS, Run, wait_for_commit


def status(place: str | Path, *options: str) -> str:
    done = subprocess.run([*RUNNER, "status", str(place), *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(place: str | Path) -> dict[str, Any]:
    return dict(json.loads(status(place, "--json")))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["volume", "s3"])
def test_any_machine_can_tell(kind: str, rclone_s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pods, each with a folder of its own: the first is lost with all it had, the second one finishes."""
    location = str(tmp_path / "volume") if kind == "volume" else f"s3://{bucket_on(rclone_s3, monkeypatch)}/run"
    job = [*SHORT_JOB, "--set", f"checkpoint.location={location}"]
    # It stands still while it is looked at: the copy of its journal is up to 15 s behind.
    first = Run(tmp_path / "pod-1", *job).start_held(30, "training.loss=kill@10")
    wait_for_commit(first, 20)
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        told = subprocess.run([*RUNNER, "status", location, "--json"], capture_output=True, text=True, timeout=400)
        if told.returncode == 0 and len(json.loads(told.stdout)["attempts"]) == 2:
            break
    alive = json.loads(told.stdout)
    assert alive["state"] == "running" and alive["attempts"][0]["kind"] == "crashed", alive
    first.signal(signal.SIGKILL)
    first.finish()

    second = Run(tmp_path / "pod-2", *job).start()
    assert second.finish() == 0, second.output
    run = figures(location)
    assert run["state"] == "finished" and run["step"] == run["total_steps"] == TOTAL_STEPS
    assert [attempt["number"] for attempt in run["attempts"]] == [1, 2, 3]
    assert sum(run["time_by_cause"].values()) == pytest.approx(run["wall_s"], abs=0.01)
    assert 0 < run["goodput"] < 1 and run["time_by_cause"]["restore"] > 0
    # The second pod's folder knows of the first one's life, too.
    assert figures(second.folder)["attempts"] == run["attempts"]
    text = status(location)
    for part in (
        "finished",
        f"{TOTAL_STEPS} of {TOTAL_STEPS}",
        "crashed",
        "goodput",
        "where the time went",
        "launch",
    ):
        assert part in text, text


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB).start_held(16)
    run.wait_for_step(15)
    now = figures(run.folder)
    assert now["state"] == "running" and now["restarts_left"] == 5 and now["step_s"] > 0
    text = status(run.folder)
    assert " left" in text and "5 restarts before the next new checkpoint" in text, text
    watching = subprocess.Popen([*RUNNER, "status", str(run.folder), "--watch"], stdout=subprocess.PIPE, text=True)
    run.end()
    output, _ = watching.communicate(timeout=400)
    assert watching.returncode == 0 and "preempted" in output


def test_where_there_is_no_run(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere", "s3://"):
        done = subprocess.run([*RUNNER, "status", str(place)], capture_output=True, text=True, timeout=400)
        assert done.returncode == 2 and "Traceback" not in done.stderr and str(place) in done.stderr, done.stderr
