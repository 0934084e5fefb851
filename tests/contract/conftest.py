from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.support import PART_BYTES
from helpers.servers import Server, bucket_on, small_disk

from checkpointing.storage import Storage, open_storage, s3_multipart

BACK_ENDS = ["path", "file-url", "tmpfs", "memory", "rclone", "radosgw"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart, "_PART_BYTES", PART_BYTES)


@pytest.fixture(params=BACK_ENDS)
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty place, as a user would name it."""
    match request.param:
        case "path":
            yield str(tmp_path / "store")
        case "file-url":
            yield f"file://{tmp_path}/store"
        case "tmpfs":
            with small_disk(tmp_path / "disk", "400M") as disk:
                yield str(disk / "store")
        case "memory":
            yield f"memory://{uuid.uuid4().hex}/runs"
        case kind:
            server: Server = request.getfixturevalue(f"{kind}_s3")
            yield f"s3://{bucket_on(server, monkeypatch)}/some/prefix"


@pytest.fixture
def storage(location: str) -> Storage:
    return open_storage(location)
