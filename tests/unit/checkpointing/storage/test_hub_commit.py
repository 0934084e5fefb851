"""Pushes to a Hub on loopback, by huggingface_hub's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from helpers.hub_server import READER, WRITER, HubServer, hub_server

from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.storage.hub_commit import Pushed, push_files

CONTENTS = {"model.safetensors": b"weights" * 99, "folder/config.json": b"{}", "empty": b""}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    # The server does not speak Xet.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    with hub_server() as server:
        server.add("me/model")
        yield server


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    for name, data in CONTENTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return {name: tmp_path / name for name in CONTENTS}


def push(hub: HubServer, files: dict[str, Path], repo: str = "me/model", **options: Any) -> Pushed:
    return push_files(repo, files, title="checkpoint-5", marker="id-5", endpoint=hub.url, **options)


def test_files_arrive_in_one_commit(hub: HubServer, files: dict[str, Path]) -> None:
    pushed = push(hub, files)
    repository = hub.repositories["me/model"]
    assert repository.files == CONTENTS
    assert (repository.commits[0]["title"], repository.commits[0]["message"]) == ("checkpoint-5", "id-5")
    assert pushed == (repository.commits[0]["id"], True) and len(repository.commits) == 2


def test_what_was_pushed_is_not_pushed_again(hub: HubServer, files: dict[str, Path]) -> None:
    first = push(hub, files)
    push_files("me/model", files, title="checkpoint-6", marker="id-6", endpoint=hub.url)
    assert push(hub, files) == (first.commit, False)
    assert len(hub.received) == 1


def test_a_marker_is_a_whole_line(hub: HubServer, files: dict[str, Path]) -> None:
    push_files("me/model", files, title="model", marker="id-5 (model only)", endpoint=hub.url)
    assert push(hub, files).is_new
    assert push_files("me/model", files, title="", marker="checkpoint-5", endpoint=hub.url).is_new is False


def test_a_failed_push_continues(hub: HubServer, files: dict[str, Path]) -> None:
    hub.fails = 400
    with pytest.raises(CheckpointError, match="the Hub refused the push to me/model"):
        push(hub, files)
    assert hub.repositories["me/model"].files == {} and len(hub.received) == 1
    hub.fails = None
    assert push(hub, files).is_new
    assert hub.repositories["me/model"].files == CONTENTS and len(hub.received) == 1


def test_a_missing_repository_is_created_if_asked_for(hub: HubServer, files: dict[str, Path]) -> None:
    with pytest.raises(
        CheckpointError, match="there is no repository me/new that the token may see; create it, or pass"
    ):
        push(hub, files, "me/new")
    assert push(hub, files, "me/new", creates_private=True).is_new
    assert push(hub, files, "me/model", creates_private=True).is_new
    assert (hub.repositories["me/new"].private, hub.repositories["me/model"].private) == (True, False)


@pytest.mark.parametrize(
    ("repo", "options", "token", "status", "reason"),
    [
        ("me/model", {}, READER, None, "does not let this token write to me/model; use one that may"),
        ("me/model", {}, "hf_wrong", None, "does not let this token write to me/model; use one that may"),
        ("me/model", {"revision": "other"}, WRITER, None, "me/model has no branch 'other'; create it, or leave"),
        ("a/b/c", {}, WRITER, None, "'a/b/c' is not the name of a repository: .*; write OWNER/NAME"),
        ("me/model", {}, WRITER, 412, "me/model was changed while the files were pushed; push again"),
        ("me/model", {}, WRITER, 507, r"the Hub did not take the push to me/model \(.*\); push again to continue"),
    ],
)
def test_refusals_are_one_sentence(
    repo: str,
    options: dict[str, Any],
    token: str,
    status: int | None,
    reason: str,
    hub: HubServer,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.fails = status
    with pytest.raises(CheckpointError, match=reason) as raised:
        push(hub, files, repo, **options)
    assert len(str(raised.value).splitlines()) == 1 and token not in str(raised.value)
    assert hub.repositories["me/model"].files == {}


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(hub: HubServer, files: dict[str, Path]) -> None:
    repository = hub.repositories["me/model"]

    class Meanwhile(dict[str, bytes]):
        def __setitem__(self, key: str, value: bytes) -> None:
            super().__setitem__(key, value)
            repository.commit("somebody else's", "")

    hub.objects = Meanwhile()
    with pytest.raises(CheckpointError, match="was changed while the files were pushed"):
        push(hub, files)
    assert repository.files == {} and repository.commits[0]["title"] == "somebody else's"
    assert push(hub, files).is_new


def test_no_token_and_no_network(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere = HubServer()
    nowhere.url = "http://127.0.0.1:9"
    monkeypatch.setenv("HF_TOKEN", WRITER)
    # Between the client's own tries.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(StorageUnreachable, match=r"did not take the push to me/model .*; push again to continue"):
        push(nowhere, files)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="there is no token to push to me/model with; run `hf auth login`"):
        push(nowhere, files)
