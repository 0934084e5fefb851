"""Real S3 servers on loopback, a bad network in front of them, and small disks."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import socket
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from infra.parts import find, lacks, require
from infra.ports import free_port, free_ports
from infra.radosgw import Cluster
from infra.tcp_proxy import Faults, TcpProxy, Traffic, tcp_proxy

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret123"


@dataclass(frozen=True)
class Server:
    """An S3 server.

    Attributes:
        name: which software it is.
        endpoint: its URL.
        cluster: the Ceph cluster behind it, if it is one.
    """

    name: str
    endpoint: str
    cluster: Cluster | None = None

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a user would export."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@dataclass(frozen=True)
class FaultProxy(Server):
    """A server behind a connection that can be bad in the ways of `infra.tcp_proxy.Faults`."""

    proxy: TcpProxy = field(default_factory=lambda: TcpProxy(0))

    def set(self, **faults: Any) -> None:
        """Set these faults, and no others; none at all without arguments."""
        self.proxy.faults = Faults(**faults)

    @property
    def traffic(self) -> Traffic:
        return self.proxy.traffic


@dataclass(frozen=True)
class Fault:
    """What befalls a request. By itself: it never arrives, and the connection breaks.

    Attributes:
        carried_out: the server gets it all the same.
        status: what is answered, with `code` in the body; 0: no answer.
        body: the page that is answered instead of an S3 error with that code.
        body_bytes: how much of the request is taken before the connection breaks.
        half: the server's own answer, but the connection breaks in the middle of it.
        trickles: the server's own answer, but for its head a byte every tenth of a second.
        damage: the server's own answer, with what this makes of its bytes.
    """

    carried_out: bool = False
    status: int = 0
    code: str = ""
    body: str = ""
    body_bytes: float = math.inf
    half: bool = False
    trickles: bool = False
    damage: Callable[[bytes], bytes] | None = None


ANSWER_LOST = Fault(carried_out=True)
ANSWER_HALVED = Fault(carried_out=True, half=True)
ANSWER_TRICKLES = Fault(carried_out=True, trickles=True)


@dataclass
class Rule:
    """The first `times` requests like `"PUT /bucket/.*manifest.json"` (a regular expression) meet with a fault.

    Attributes:
        after: only when this rule has been met.
        hits: how many have been.
    """

    request: str
    fault: Fault
    times: float = math.inf
    after: Rule | None = None
    hits: int = 0

    def applies(self, request: str) -> bool:
        if self.hits >= self.times or (self.after and not self.after.hits) or not re.match(self.request, request):
            return False
        self.hits += 1
        return True


@dataclass(frozen=True)
class MeddlingProxy(Server):
    """A server behind a proxy that understands HTTP.

    Attributes:
        seen: the requests that reached the proxy.
        own_errors: those to which the server itself, and no rule, answered that it has failed (5xx).
    """

    rules: list[Rule] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    own_errors: list[str] = field(default_factory=list)

    def add(self, request: str, fault: Fault, times: float = math.inf, after: Rule | None = None) -> Rule:
        rule = Rule(request, fault, times, after)
        self.rules.append(rule)
        return rule

    def count(self, request: str) -> int:
        """Return the number of requests that reached the proxy and match."""
        return sum(bool(re.match(request, one)) for one in self.seen)


@contextlib.contextmanager
def rclone_server(folder: Path, port: int | None = None) -> Iterator[Server]:
    """`rclone serve s3` over a folder. It ignores `If-None-Match`."""
    binary, port = find("rclone"), port or free_port()
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
    port, second, first = free_ports(3)
    cluster = Cluster(folder, port, (second, first))
    try:
        cluster.start(ACCESS_KEY, SECRET_KEY)
        _wait_for(port)
        yield Server("radosgw", f"http://127.0.0.1:{port}", cluster)
    finally:
        cluster.stop()


@contextlib.contextmanager
def without_gateway(server: Server) -> Iterator[None]:
    """Kill radosgw; restart it afterwards, with its data."""
    assert server.cluster is not None
    server.cluster.kill_gateway()
    try:
        yield
    finally:
        server.cluster.start_gateway()
        _wait_for(server.port)


@contextlib.contextmanager
def fault_proxy(server: Server) -> Iterator[FaultProxy]:
    """The server behind a proxy that breaks connections, delays them and falls silent."""
    with tcp_proxy(server.port) as proxy:
        yield FaultProxy(server.name, f"http://127.0.0.1:{proxy.port}", proxy=proxy)


@contextlib.contextmanager
def meddling_proxy(server: Server) -> Iterator[MeddlingProxy]:
    """The server behind a proxy that damages single requests or their answers."""
    upstream, lock = server.endpoint.removeprefix("http://"), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            pass

        def meddle(self) -> None:
            request = f"{self.command} {self.path}"
            with lock:
                proxy.seen.append(request)
                fault = next((rule.fault for rule in proxy.rules if rule.applies(request)), None)
            length = int(self.headers.get("Content-Length", 0))
            try:
                body = self.rfile.read(length if fault is None else int(min(length, fault.body_bytes)))
                answer = self.ask(body) if fault is None or fault.carried_out else None
                if fault is None or fault.half or fault.trickles or fault.damage is not None:
                    assert answer is not None
                    if answer[0] >= 500:
                        proxy.own_errors.append(request)
                    status, headers, data = answer
                    if fault is not None and fault.damage is not None and status < 300:
                        data = fault.damage(data)
                    self.answer(status, headers, data, fault or Fault())
                elif fault.status:
                    error = f"<Error><Code>{fault.code}</Code><Message>{fault.code}</Message></Error>"
                    # As of a web server's file.
                    page = {"Content-Type": "text/html", "ETag": '"65a1b2c3-264"'}
                    headers = page if fault.body else {"Content-Type": "application/xml"}
                    self.answer(fault.status, headers, (fault.body or error).encode(), Fault())
                else:
                    self.hang_up()
            except ConnectionError:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = meddle

        def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(upstream, timeout=60)
            with contextlib.closing(connection):
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("expect", "connection"):
                        connection.putheader(name, value)
                connection.endheaders(body)
                response = connection.getresponse()
                return response.status, dict(response.getheaders()), response.read()

        def answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
            # A HEAD's answer has the length of what it leaves out.
            length = headers.get("Content-Length") if self.command == "HEAD" else len(body)
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            if self.command == "HEAD":
                return
            for start in range(len(body) if fault.trickles else 0):
                self.wfile.write(body[start : start + 1])
                time.sleep(0.1)
            if not fault.trickles:
                self.wfile.write(body[: len(body) // 2] if fault.half else body)
            if fault.half:
                self.hang_up(reset=False)

        def hang_up(self, reset: bool = True) -> None:
            if reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    class Listener(ThreadingHTTPServer):
        block_on_close = False
        request_queue_size = 64

    with Listener(("127.0.0.1", 0), Handler) as listener:
        proxy = MeddlingProxy(server.name, f"http://127.0.0.1:{listener.server_port}")
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown()
            thread.join()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A new folder on a separate disk."""
    require("tmpfs")
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        lacks("tmpfs", mounted.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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
