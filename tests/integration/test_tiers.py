"""A fast local directory in front of S3: committed there, uploaded from there, resumed from the nearest valid copy."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.servers import Server, bucket_on, rclone_server, small_disk
from infra.ports import free_port
from integration.support import RUNNER, Run, loss_curve, script, state_hash, wait_for_commit, wait_until

from checkpointing.commit.catalog import Catalog
from checkpointing.storage import open_storage


@pytest.fixture
def location(rclone_s3: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"s3://{bucket_on(rclone_s3, monkeypatch)}/run"


def options(location: str, local: Path, *more: str) -> list[str]:
    settings = [f"checkpoint.location={location}", f"checkpoint.local_tier={local}", *more]
    return [part for setting in settings for part in ("--set", setting)]


def steps(place: str | Path) -> list[int]:
    return Catalog(open_storage(str(place))).committed_steps()


def test_the_nearest_valid_copy_is_resumed_from_and_s3_alone_is_enough(
    tmp_path: Path, location: str, untouched_script: Run
) -> None:
    local = tmp_path / "nvme"
    chosen = options(location, local, "checkpoint.local_keep_last=2")
    path = Path(script(tmp_path, crawl=28)[0])
    # What is not to be kept for good need not be uploaded once there is a newer one.
    path.write_text(path.read_text().replace("train_dataset=rows))", "train_dataset=rows), keep_every=10)"))
    run = Run(tmp_path / "run", *chosen, script=[str(path), "--steps", "60"]).start()
    wait_for_commit(run, 30)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    # When the runner ends, both tiers hold what it reported as committed; the local one keeps fewer steps.
    newest = run.events("committed")[-1]["step"]
    assert steps(location)[-1] == steps(local)[-1] == newest
    assert len(steps(local)) == 2 and 10 in steps(location)
    listed = subprocess.run([*RUNNER, "checkpoints", "list", str(run.folder)], capture_output=True, text=True).stdout
    tiers = [line.split() for line in listed.splitlines()[1:]]
    assert [(fields[0], fields[5]) for fields in tiers[:2]] == [(str(newest), "local"), (str(newest), "remote")]

    # A damaged copy on the local disk: the other one, of the same step.
    damaged = local / f"checkpoint-{newest}" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"damaged!")
    # The script's text says how slowly it trains.
    changed = (*chosen, "--allow-changes")
    again = Run(run.folder, *changed, script=script(tmp_path, crawl=0, attempt=2)).start()
    wait_until(again, lambda: again.events("resumed"))
    again.signal(signal.SIGTERM)
    assert again.finish() == 75, again.output
    assert [(e["source"], e["step"]) for e in again.events("resumed")] == [("remote", newest)]
    assert [e["step"] for e in again.events("checkpoint_quarantined")] == [newest]

    # The machine is gone, and with it the local tier.
    newest = steps(location)[-1]
    shutil.rmtree(local)
    shutil.rmtree(run.folder)
    fresh = Run(tmp_path / "run", *changed, script=script(tmp_path)).start()
    assert fresh.finish() == 0, fresh.output
    assert [(e["source"], e["step"]) for e in fresh.events("resumed")] == [("memory", newest)], (
        "fetched once for all ranks"
    )
    assert [e["step"] for e in fresh.events("fetched")] == [newest]
    assert state_hash(local / "checkpoint-60") == state_hash(untouched_script.checkpoint(60))
    assert loss_curve(local / "checkpoint-60") == loss_curve(untouched_script.checkpoint(60))
    assert not fresh.leftovers()


@pytest.mark.soak
def test_a_local_tier_that_is_full_is_passed_by(tmp_path: Path, location: str) -> None:
    """The durable tier then gets the snapshot from memory."""
    with small_disk(tmp_path / "small", "100K") as mount:
        run = Run(
            tmp_path / "run",
            *options(location, mount / "local", "checkpoint.max_failed_saves=null"),
            script=script(tmp_path),
        ).start()
        assert run.finish() == 0, run.output
    failed = run.events("commit_failed")
    assert failed and all(e["tier"] == "local" and "No space left" in e["error"] for e in failed)
    assert steps(location)[-1] == 60
    assert {e["tier"] for e in run.events("committed")} == {"remote"}


@pytest.mark.soak
def test_a_killed_agent_loses_no_upload(tmp_path: Path, location: str, untouched_script: Run) -> None:
    """A checkpoint that only the local tier holds is uploaded by the next agent."""
    run = Run(tmp_path / "run", *options(location, tmp_path / "nvme"), script=script(tmp_path, crawl=20)).start()
    wait_for_commit(run, 20)
    os.kill(run.agent_pid(), signal.SIGKILL)
    assert run.finish() == 0, run.output
    assert len(run.events("attempt_started")) == 2
    assert steps(location)[-1] == 60
    exported = tmp_path / "exported"
    subprocess.run([*RUNNER, "checkpoints", "export", location, "60", str(exported)], check=True, capture_output=True)
    assert state_hash(exported) == state_hash(untouched_script.checkpoint(60))


@pytest.mark.soak
def test_s3_is_away_when_a_rank_dies(
    tmp_path: Path, rclone_s3: Server, monkeypatch: pytest.MonkeyPatch, untouched_script: Run
) -> None:
    """The attempt resumes from what is on the machine; the durable tier is fenced and caught up once it is back."""
    folder, port = tmp_path / "objects", free_port()
    with rclone_server(folder, port) as server:
        place = f"s3://{bucket_on(server, monkeypatch)}/run"
        run = Run(tmp_path / "run", *options(place, tmp_path / "nvme"), script=script(tmp_path, crawl=10)).start()
        wait_until(run, lambda: any(event["tier"] == "remote" for event in run.events("committed")))
    os.kill(run.rank_pid(0), signal.SIGKILL)
    wait_until(run, lambda: len(run.events("attempt_started")) == 2 and run.events("resumed"))
    assert run.events("tier_unreachable")
    assert {event["tier"] for event in run.events("storage_retried")} == {"remote"}
    with rclone_server(folder, port):
        assert run.finish() == 0, run.output
        assert "storage calls (remote checkpoints); the last one failed with: " in run.output
        assert Catalog(open_storage(place)).verify(60).attempt == 2
        assert open_storage(place).fence().attempt == 2
    assert state_hash(tmp_path / "nvme" / "checkpoint-60") == state_hash(untouched_script.checkpoint(60))


@pytest.mark.soak
def test_s3_is_away_when_the_runner_starts_again(
    tmp_path: Path, rclone_s3: Server, monkeypatch: pytest.MonkeyPatch, untouched_script: Run
) -> None:
    """After a reboot, for example: it continues from what is on the machine, and uploads it later."""
    folder, port = tmp_path / "objects", free_port()
    with rclone_server(folder, port) as server:
        place = f"s3://{bucket_on(server, monkeypatch)}/run"
        chosen = options(place, tmp_path / "nvme")
        run = Run(tmp_path / "run", *chosen, script=script(tmp_path, crawl=28)).start()
        wait_until(run, lambda: any(event["tier"] == "remote" for event in run.events("committed")))
        run.signal(signal.SIGTERM)
        assert run.finish() == 75, run.output
    newest = steps(tmp_path / "nvme")[-1]
    again = Run(run.folder, *chosen, "--allow-changes", script=script(tmp_path, crawl=0, attempt=2)).start()
    wait_until(again, lambda: len(again.events("resumed")) == 1)
    assert again.events("resumed")[0]["step"] == newest
    with rclone_server(folder, port):
        assert again.finish() == 0, again.output
        assert Catalog(open_storage(place)).verify(60).attempt == 2
    assert "resuming from" in again.output and "uploads follow" in again.output
    assert state_hash(tmp_path / "nvme" / "checkpoint-60") == state_hash(untouched_script.checkpoint(60))
