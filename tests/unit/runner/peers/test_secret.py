from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.storage import open_storage
from runner.errors import UsageError
from runner.peers.secret import RECORD_NAME, VARIABLE, ensure_secret, read_secret


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_first_node_writes_it_and_the_others_read_it(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "volume"))
    assert read_secret(storage) is None
    secret = ensure_secret(storage)
    assert len(secret) == 64
    assert ensure_secret(storage) == read_secret(open_storage(str(tmp_path / "volume"))) == secret
    assert ensure_secret(open_storage(str(tmp_path / "other"))) != secret


@pytest.mark.parametrize("damaged", [b"", b"\n", b"short", b"g" * 64, b"a" * 65])
def test_a_damaged_one_is_replaced(damaged: bytes, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.sidecars.write(RECORD_NAME, damaged)
    assert read_secret(storage) is None
    assert read_secret(storage) != ensure_secret(storage) == read_secret(storage)


def test_the_environments_comes_first_and_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    monkeypatch.setenv(VARIABLE, " correct horse battery staple\n")
    assert ensure_secret(storage) == read_secret(storage) == b"correct horse battery staple"
    assert storage.sidecars.sizes() == {}


def test_a_short_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hunter2")
    for function in (read_secret, ensure_secret):
        with pytest.raises(UsageError, match="RUNNER_SECRET has 7 characters; use 16 or more") as caught:
            function(open_storage(str(tmp_path)))
        assert "hunter2" not in str(caught.value)
