"""An S3 server on loopback: Ceph's radosgw, its data in memory, and a slow link to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
from infra.parts import PARTS
from infra.ports import free_ports
from infra.radosgw import Cluster

from library.workers import set_affinity

_ACCESS_KEY, _SECRET_KEY = "bench", "bench-secret"
_START_TIMEOUT_S = 60.0
# Server and link run on this core, training on core 0.
FAR_CORE = 1


def missing(part: str) -> str:
    """Return what keeps a server or a tool from working here, and how to get it; an empty string if nothing does."""
    why = PARTS[part].missing()
    return why and f"{why}: {PARTS[part].remedy()}"


class Gateway:
    """A running radosgw, which this process and what it starts reach by their environment.

    Attributes:
        endpoint: Its URL.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.endpoint = f"http://127.0.0.1:{cluster.port}"
        os.environ.update(
            AWS_ENDPOINT_URL=self.endpoint,
            AWS_ACCESS_KEY_ID=_ACCESS_KEY,
            AWS_SECRET_ACCESS_KEY=_SECRET_KEY,
            AWS_DEFAULT_REGION="us-east-1",
            # The user's own settings do not count.
            AWS_CONFIG_FILE="/dev/null",
            AWS_SHARED_CREDENTIALS_FILE="/dev/null",
        )

    def make_bucket(self, name: str) -> Any:
        """Make a bucket; return it as boto3's resource."""
        return boto3.resource("s3").create_bucket(Bucket=name)

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
    def behind_slow_link(self, round_trip_ms: float, mbit_per_s: float) -> Iterator[str]:
        """Yield the endpoint behind a slow link; server and link run on the far core."""
        self.move_to([FAR_CORE])
        link = [sys.executable, str(Path(__file__).with_name("link.py"))]
        order = [self._cluster.port, round_trip_ms, mbit_per_s]
        command = ["taskset", "-c", str(FAR_CORE), *link, *map(str, order)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield f"http://127.0.0.1:{int(process.stdout.readline())}"
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
