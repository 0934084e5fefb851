"""`runner checkpoints push` to a Hub on loopback: killed in the middle, it continues, and nothing is pushed twice."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers.hub_server import WRITER, HubServer, hub_server
from helpers.spread_checkpoint import FILE, ROWS, commit_spread

from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.storage import LocalStorage

FILES = {
    "model.safetensors": os.urandom(300_000),
    "optimizer.pt": os.urandom(600_000),
    "rng_state.pth": os.urandom(5_000),
    "config.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        server.add("me/model")
        yield server


@pytest.fixture
def run(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "run")
    staged = [StagedFile(name, [memoryview(data)], partial(digest_buffer, data)) for name, data in FILES.items()]
    commit_snapshot(storage, SnapshotInfo("mine", 1, 10, 1, 10), staged)
    return storage


def push(hub: HubServer, *arguments: object) -> subprocess.Popen[str]:
    # The server does not speak Xet.
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "runner", "checkpoints", "push", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pushed(hub: HubServer, *arguments: object) -> str:
    output, errors = push(hub, *arguments).communicate(timeout=120)
    assert "Traceback" not in errors
    return output or errors.splitlines()[-1]


def test_a_killed_push_continues_and_is_made_once(hub: HubServer, run: LocalStorage) -> None:
    hub.accepts = 1
    killed = push(hub, run.root, "me/model")
    assert hub.held.wait(120)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    repository = hub.repositories["me/model"]
    assert (repository.files, len(repository.commits), len(hub.received)) == ({}, 1, 1)

    hub.accepts = 1 << 30
    assert pushed(hub, run.root, "me/model").startswith("checkpoint-10: 4 files pushed to me/model, commit ")
    assert repository.files == FILES and len(repository.commits) == 2
    assert repository.commits[0]["title"] == "checkpoint-10 of run mine"
    assert run.read_manifest(10).identity in repository.commits[0]["message"]
    # The file that arrived before the kill was not sent again.
    large = {hashlib.sha256(data).hexdigest() for name, data in FILES.items() if name != "config.json"}
    assert sorted(hub.received) == sorted(large)

    again = pushed(hub, run.directory(10), "me/model")
    assert again == f"checkpoint-10: was pushed before to me/model, commit {repository.commits[0]['id']}\n"
    assert len(repository.commits) == 2


def test_a_model_alone_out_of_shards(hub: HubServer, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "spread")
    commit_spread(storage, 10, ROWS)
    assert "1 files pushed to me/new" in pushed(hub, storage.root, "me/new", "--private", "--model-only")
    assert hub.repositories["me/new"].private and hub.repositories["me/new"].files == {"model.safetensors": FILE}
    refusal = "runner: error: there is no repository me/other that the token may see; create it, or pass --private to"
    assert pushed(hub, storage.root, "me/other").startswith(refusal)


def test_a_damaged_checkpoint_is_not_pushed(hub: HubServer, run: LocalStorage) -> None:
    (run.directory(10) / "optimizer.pt").write_bytes(os.urandom(600_000))
    assert "optimizer.pt was altered" in pushed(hub, run.root, "me/model")
    assert hub.received == [] and len(hub.repositories["me/model"].commits) == 1
