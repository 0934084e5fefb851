"""`runner doctor` on this machine, and on set-ups that are broken on purpose."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any

import boto3
import pytest
from helpers.servers import Server, bucket_on
from infra.parts import lacks, needs
from infra.ports import free_port
from integration.support import RUNNER

CGROUP = Path("/sys/fs/cgroup/memory")
ALONE = ("--nproc-per-node", "1")


def doctor(
    folder: Path, *options: str, code: int, before: str = "", environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """What it finds. `before`: shell commands in a mount namespace of its own."""
    command = [*RUNNER, "doctor", "--json", "--output-dir", str(folder / "run"), *options]
    if before:
        command = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **(environment or {})}
    )
    assert "Traceback" not in done.stderr and done.stdout, done.stderr
    assert done.returncode == code, done.stdout
    return list(json.loads(done.stdout))


def failed(findings: list[dict[str, Any]]) -> dict[str, str]:
    return {one["subject"]: one["text"] for one in findings if one["level"] == "fail"}


@pytest.mark.soak
def test_this_machine(tmp_path: Path) -> None:
    findings = doctor(tmp_path, code=0)
    by_subject = {one["subject"]: one for one in findings}
    assert "correct on 2 ranks over gloo; bus bandwidth" in by_subject["all-reduce"]["text"]
    assert "MB/s" in by_subject["checkpoint.location bandwidth"]["text"]
    for subject in ("GPUs", "memory", "memlock", "open files", "clock", "checkpoint.location", "speed of ranks"):
        assert subject in by_subject, subject
    assert all(one["fix"] for one in findings if one["level"] != "ok")
    assert not any(tmp_path.iterdir()), "it leaves nothing behind"
    # For people.
    command = [*RUNNER, "doctor", "--output-dir", str(tmp_path / "run"), *ALONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ok    memory: " in done.stdout and " 0 failed" in done.stdout, done.stdout


def test_a_wrong_interface(tmp_path: Path) -> None:
    wrong = failed(doctor(tmp_path, code=1, environment={"GLOO_SOCKET_IFNAME": "wrong0"}))
    assert (
        list(wrong) == ["GLOO_SOCKET_IFNAME"] and "'wrong0': no such network interface" in wrong["GLOO_SOCKET_IFNAME"]
    )


def meeting() -> list[str]:
    endpoint = f"127.0.0.1:{free_port()}"
    return ["--nnodes", "2", *ALONE, "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]


@pytest.mark.soak
def test_two_machines_meet(tmp_path: Path) -> None:
    """Two doctors at once, one rank each, over the rendezvous that the run will use."""
    options = [*meeting(), "--json"]
    commands = [
        [*RUNNER, "doctor", "--output-dir", str(tmp_path / f"run-{rank}"), *options, "--node-rank", str(rank)]
        for rank in (0, 1)
    ]
    doctors = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in commands]
    told = [json.loads(one.communicate(timeout=300)[0]) for one in doctors]
    # Alone, or pytest shortens what the failed check says.
    assert [[one for one in findings if one["level"] == "fail"] for findings in told] == [[], []]
    assert [one.returncode for one in doctors] == [0, 0], told
    found = [next(one["text"] for one in findings if one["subject"] == "all-reduce") for findings in told]
    assert all("correct on 2 ranks over gloo" in text for text in found), found


@pytest.mark.soak
def test_one_of_two_machines_is_left_alone(tmp_path: Path) -> None:
    alone = failed(doctor(tmp_path, *meeting(), "--set", "launch.rendezvous_timeout_s=5", code=1))
    assert list(alone) == ["all-reduce"]


@needs("tmpfs")
@pytest.mark.soak
def test_a_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=12m small {place}"
    wrong = failed(doctor(tmp_path, *ALONE, "--set", f"checkpoint.location={place}", code=1, before=mount))
    assert list(wrong) == ["checkpoint.location"] and "free at" in wrong["checkpoint.location"]


@pytest.mark.soak
@needs("tmpfs")
def test_little_shared_memory(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=64m small /dev/shm"
    findings = doctor(tmp_path, *ALONE, code=0, before=mount)
    assert [one["level"] for one in findings if one["subject"] == "/dev/shm"] == ["warn"]
    wrong = failed(doctor(tmp_path, *ALONE, "--set", "trainer.dataloader_num_workers=4", code=1, before=mount))
    assert list(wrong) == ["/dev/shm"] and "4 DataLoader workers" in wrong["/dev/shm"]


@pytest.mark.soak
def test_a_bad_key(rclone_s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"s3://{bucket_on(rclone_s3, monkeypatch)}/run"
    findings = doctor(tmp_path, *ALONE, "--set", f"checkpoint.location={location}", code=0)
    levels = {one["level"]: one["text"] for one in findings if one["subject"] == "checkpoint.location"}
    assert "reads" in levels["ok"] and "cannot fence off concurrent writers" in levels["ok"] and "warn" in levels
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    wrong = failed(doctor(tmp_path, *ALONE, "--set", f"checkpoint.location={location}", code=1))
    assert list(wrong) == ["checkpoint.location"] and "AWS_SECRET_ACCESS_KEY" in wrong["checkpoint.location"]


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A real cgroup whose processes may have 1 GB: enough for the doctor, too little for two ranks."""
    folder = CGROUP / f"runner-doctor-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(10**9))
    except OSError as error:
        lacks("memory cgroup", error)
    yield folder
    folder.rmdir()


@pytest.mark.soak
def test_a_low_memory_limit(little_memory: Path, tmp_path: Path) -> None:
    join = f"echo $$ > {little_memory}/cgroup.procs"
    wrong = failed(doctor(tmp_path, code=1, before=join))
    assert "2 ranks need about" in wrong["memory"]


@pytest.mark.soak
def test_an_unknown_model(tmp_path: Path) -> None:
    nowhere = "model.name_or_path=nobody/nothing"
    wrong = failed(doctor(tmp_path, "--set", nowhere, code=1, environment={"HF_HUB_OFFLINE": "1"}))
    assert list(wrong) == ["model"] and "nothing" in wrong["model"]


@pytest.mark.soak
def test_machines_that_do_not_fit_together(tmp_path: Path) -> None:
    wrong = failed(doctor(tmp_path, "--nnodes", "2", "--node-rank", "2", code=1))
    assert "node rank 2" in wrong["launch"]
    elsewhere = ("--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:29500")
    wrong = failed(doctor(tmp_path, *elsewhere, "--set", "launch.rendezvous_timeout_s=5", code=1))
    assert "cannot be resolved" in wrong["rendezvous"]


# -- a script --------------------------------------------------------------------------------------------------------

SCRIPT = """\
import argparse
import torch
import own
from transformers import Trainer
raise SystemExit("the doctor has run it")
"""
LOOP = """\
import torch
from checkpointing import CheckpointManager
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, save_steps=1)
for step in range(manager.resume(), 3):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    manager.step(step + 1)
manager.close()
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a sound script, one of its modules, and a file of settings."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "own.py").write_text("raise SystemExit('the doctor has run it')\n")
    (folder / "settings.yaml").write_text("lr: 1\n")
    return folder


def tree(folder: Path) -> dict[str, tuple[int, int] | None]:
    """All names, and of files what would have changed; a folder changes where a commit is tried in it."""
    found = {str(path): path.stat() for path in sorted(folder.rglob("*"))}
    return {name: (one.st_mtime_ns, one.st_size) if S_ISREG(one.st_mode) else None for name, one in found.items()}


def of_script(
    job: Path, *options: str, code: int, script: str = "train.py", arguments: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    return doctor(job.parent, *ALONE, *options, str(job / script), *arguments, code=code)


def test_a_sound_script_is_examined_in_seconds_and_nothing_is_touched(job: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    subprocess.run([*RUNNER, "config"], capture_output=True, check=True)
    start_up_s, before, began = time.monotonic() - began, tree(tmp_path), time.monotonic()
    findings = of_script(job, code=0, arguments=("--config", str(job / "settings.yaml")))
    # About 0.5 s on a warm machine, where it may take 15 s.
    assert time.monotonic() - began < 15 * max(start_up_s / 0.5, 1)
    assert tree(tmp_path) == before
    found = {one["subject"]: one["text"] for one in findings}
    assert (
        found["program"].startswith("script train.py, 1 rank on 1 node") and "1 path can be used" in found["arguments"]
    )
    assert "1 of its own modules" in found["imports"] and found["start"] == "would begin a new run"


def test_what_is_broken_is_named(job: Path, tmp_path: Path) -> None:
    (job / "broken.py").write_text("import torch\nimport not_there\n")
    (job / "settings.yaml").write_text("lr: [1\n")
    port = free_port()
    output = tmp_path / "run"
    output.write_text("a file, where the folder of the run should be")
    with socket.create_server(("127.0.0.1", port)):
        before = tree(tmp_path)
        options = ("--metrics-port", str(port))
        wrong = failed(
            of_script(job, *options, code=1, script="broken.py", arguments=("--config", str(job / "settings.yaml")))
        )
        assert tree(tmp_path) == before
    assert set(wrong) == {"imports", "arguments", "monitoring.port", "output_dir", "checkpoint.location"}
    assert wrong["imports"] == "broken.py:2: no module 'not_there'"
    assert "is not YAML" in wrong["arguments"] and "Address already in use" in wrong["monitoring.port"]


@needs("tmpfs")
def test_an_output_that_is_read_only(job: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    mount = f"mount -t tmpfs -o ro none {tmp_path / 'run'}"
    wrong = failed(doctor(tmp_path, *ALONE, str(job / "train.py"), code=1, before=mount))
    assert set(wrong) == {"output_dir", "checkpoint.location"} and "Read-only file system" in wrong["output_dir"]


def test_the_folder_of_another_job(job: Path, tmp_path: Path) -> None:
    (job / "train.py").write_text(LOOP)
    command = [*RUNNER, "start", *ALONE, "--output-dir", str(tmp_path / "run"), str(job / "train.py")]
    subprocess.run(command, capture_output=True, check=True, timeout=300)
    before = tree(tmp_path / "run")
    found = [one for one in of_script(job, code=0) if one["subject"] == "start"]
    assert [one["level"] for one in found] == ["warn"] and "this run is finished" in found[0]["text"]
    wrong = failed(of_script(job, code=1, arguments=("--seed", "2")))
    assert list(wrong) == ["start"] and "of another job (--seed" in wrong["start"]
    sizes = [one["text"] for one in of_script(job, code=0) if "checkpoints and one being written" in one["text"]]
    assert len(sizes) == 1 and tree(tmp_path / "run") == before
    # The start says the same.
    done = subprocess.run([*command, "--seed", "2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and wrong["start"].removeprefix("would be refused: ") in done.stderr


def test_a_wrong_bucket(rclone_s3: Server, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_on(rclone_s3, monkeypatch)
    location = f"checkpoint.location=s3://{bucket}/run"
    found = [one for one in of_script(job, "--set", location, code=0) if one["subject"] == "checkpoint.location"]
    assert {one["level"] for one in found} == {"ok", "warn"} and "a commit was tried" in found[-1]["text"]
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=bucket), "it leaves nothing behind"
    wrong = failed(of_script(job, "--set", f"{location.replace(bucket, 'no-such-bucket')}", code=1))
    assert list(wrong) == ["checkpoint.location"] and "no-such-bucket" in wrong["checkpoint.location"]
