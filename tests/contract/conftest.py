from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from servers import Server, bucket_on

from checkpointing.storage import Storage, open_storage

BACK_ENDS = ["path", "file-url", "memory", "rclone", "radosgw"]


@pytest.fixture(params=BACK_ENDS)
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place, as a user would name it."""
    match request.param:
        case "path":
            return str(tmp_path / "store")
        case "file-url":
            return f"file://{tmp_path}/store"
        case "memory":
            return f"memory://{uuid.uuid4().hex}/runs"
        case kind:
            server: Server = request.getfixturevalue(f"{kind}_s3")
            return f"s3://{bucket_on(server, monkeypatch)}/some/prefix"


@pytest.fixture
def storage(location: str) -> Storage:
    return open_storage(location)
