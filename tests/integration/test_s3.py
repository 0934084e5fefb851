"""Runs whose checkpoints are stored in S3."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import boto3
import pytest
from helpers.servers import Server, bucket_on, without_gateway
from integration.support import (
    RUNNER,
    SAVE_STEPS,
    SHORT_JOB,
    TOTAL_STEPS,
    Run,
    loss_curve,
    state_hash,
    wait_for_commit,
    wait_until,
)


@pytest.fixture
def s3_location(radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"s3://{bucket_on(radosgw_s3, monkeypatch)}/team/run-1"


def runner(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUNNER, *arguments], capture_output=True, text=True, timeout=120)


def test_server_and_ranks_are_killed_and_the_machine_is_lost(
    tmp_path: Path, s3_location: str, radosgw_s3: Server, untouched: Run
) -> None:
    """The default job on S3 alone; its server dies between the data and the manifest of a checkpoint."""
    options = [*SHORT_JOB, "--set", f"checkpoint.location={s3_location}"]
    run = Run(tmp_path / "run", *options).start_held(SAVE_STEPS + 6, "remote.publishing=pause")
    wait_until(run, (run.fired / "remote.publishing").exists)
    with without_gateway(radosgw_s3):
        run.wait_for_step(SAVE_STEPS + 5)
        run.wait_until_held()
    wait_for_commit(run, SAVE_STEPS)
    os.kill(run.rank_pid(0), signal.SIGKILL)
    wait_until(run, lambda: run.events("resumed"))
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert len(run.events("attempt_started")) == 2 and not run.events("commit_failed")
    stopped_at = run.events("committed")[-1]["step"]

    # The machine and its disk are lost.
    shutil.rmtree(run.folder)
    again = Run(tmp_path / "run", *options).start()
    assert again.finish() == 0, again.output
    assert [(event["source"], event["step"]) for event in again.events("resumed")] == [("memory", stopped_at)]
    assert [event["step"] for event in again.events("fetched")] == [stopped_at], "once for all ranks"
    assert again.events("attempt_started")[0]["attempt"] == 3

    assert runner("checkpoints", "verify", s3_location).returncode == 0
    # Any machine can tell, the life of the lost one included.
    told = json.loads(runner("status", s3_location, "--json").stdout)
    assert told["state"] == "finished" and told["step"] == TOTAL_STEPS
    assert [attempt["number"] for attempt in told["attempts"]] == [1, 2, 3]
    exported = tmp_path / "exported"
    result = runner("checkpoints", "export", s3_location, str(TOTAL_STEPS), str(exported))
    assert result.returncode == 0, result.stderr
    assert state_hash(exported) == state_hash(untouched.checkpoint(TOTAL_STEPS))
    assert loss_curve(exported) == loss_curve(untouched.checkpoint(TOTAL_STEPS))
    assert runner("checkpoints", "export", s3_location, str(TOTAL_STEPS), str(exported)).returncode == 2
    assert not again.leftovers()


def test_a_bucket_that_goes_in_mid_run_costs_saves_and_then_the_run(
    rclone_s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues meanwhile, until so many saves in a row have failed that further steps would be lost."""
    name = bucket_on(rclone_s3, monkeypatch)
    settings = [f"checkpoint.location=s3://{name}/run", "trainer.save_steps=10", "checkpoint.max_failed_saves=2"]
    run = Run(tmp_path / "run", *SHORT_JOB, *(part for setting in settings for part in ("--set", setting))).start()
    wait_for_commit(run, 10)
    bucket = boto3.resource("s3").Bucket(name)
    while True:
        bucket.objects.delete()
        with contextlib.suppress(bucket.meta.client.exceptions.ClientError):
            bucket.delete()
            break
    gone_at = max(event["step"] for event in run.events("log"))
    assert run.finish() == 74, run.output
    failed = run.events("commit_failed")
    # The objects of a bucket are deleted before it, the fence too.
    assert len(failed) >= 2
    assert all("bucket" in event["error"] or "its fence is gone" in event["error"] for event in failed)
    assert run.events("attempt_ended")[-1]["step"] > gone_at
    assert "max_failed_saves" in run.events("run_ended")[0]["reason"] and "Traceback" not in run.output
    assert not run.leftovers()


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "AWS_ACCESS_KEY_ID"),
        ({"bucket": "no-such-bucket"}, "bucket does not exist"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(
    change: dict[str, str],
    fix: str,
    tmp_path: Path,
    radosgw_s3: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = change.pop("bucket", None) or bucket_on(radosgw_s3, monkeypatch)
    for name, value in {**radosgw_s3.environment, **change}.items():
        monkeypatch.setenv(name, value)
    result = runner("start", "--output-dir", str(tmp_path / "run"), "--set", f"checkpoint.location=s3://{bucket}/x")
    assert result.returncode == 2 and fix in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1
