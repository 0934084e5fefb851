"""A clock that jumps for one process, a memory limit that is lowered under one, and a proxy that a fault disturbs."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from infra.parts import lacks

from runner.chaos.sandbox import Clock, FaultyProxy, MemoryGroup, endpoint_of_environment

WAITING = """
import datetime, multiprocessing, sys, threading, time
for line in sys.stdin:
    began = time.monotonic()
    time.sleep(0.05)
    threading.Event().wait(0.05)
    multiprocessing.Semaphore(0).acquire(timeout=0.05)
    print(time.time(), datetime.datetime.now().timestamp(), time.monotonic() - began, flush=True)
"""


def test_it_jumps_and_nothing_else_does(tmp_path: Path) -> None:
    try:
        clock = Clock(tmp_path)
    except OSError as error:
        lacks("C compiler", error)
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clock.environment},
    )
    assert process.stdin is not None and process.stdout is not None
    for seconds in (0, 3600, -3600, 0):
        clock.set(seconds)
        before = time.time()
        process.stdin.write("\n")
        process.stdin.flush()
        now, today, waited = map(float, process.stdout.readline().split())
        assert before <= now - seconds <= time.time() and before <= today - seconds <= time.time()
        # The jump is an hour.
        assert 0.15 <= waited < 600
    process.stdin.close()
    assert process.wait(120) == 0


# Takes 64 MiB more with each line.
GREEDY = """
import sys
taken = []
print("ready", flush=True)
for line in sys.stdin:
    taken.append(bytearray(b"x") * (64 << 20))
    print("taken", flush=True)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        group = MemoryGroup()
    except OSError as error:
        lacks("memory cgroup", error)
    yield group
    group.close()


def test_who_needs_more_is_ended_and_only_while_the_limit_stands(group: MemoryGroup) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        keys, words = process.stdin, process.stdout
        assert keys is not None and words is not None
        group.enter(process.pid)

        def take() -> str:
            keys.write("\n")
            keys.flush()
            return words.readline().strip()

        assert words.readline().strip() == "ready"
        with group.limited(256 << 20):
            assert take() == "taken"
        with group.limited(256 << 20):
            assert [take() for _ in range(2)] == ["taken", "taken"]
        assert take() == "taken" and group.num_kills == 0
        with group.limited(0):
            assert take() == ""
        assert group.num_kills == 1 and process.wait(120) == -9


# -- the proxy in front of an S3 server: transparent, until a fault lasts ---------------------------------------------

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"


class Upstream:
    """Answers every request, one connection after the other."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.requests: list[bytes] = []
        self.num_accepted = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self.num_accepted += 1
                with connection, contextlib.suppress(OSError):
                    if request := connection.recv(65536):
                        self.requests.append(request)
                        connection.sendall(ANSWER)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    yield made
    made.close()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[FaultyProxy]:
    with FaultyProxy(upstream.url) as made:
        yield made


def ask(proxy: FaultyProxy, method: str = "GET", timeout_s: float = 10.0) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request(method, "/bucket/key")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        ({"AWS_ENDPOINT_URL": "http://a:9000"}, "http://a:9000"),
        ({"AWS_ENDPOINT_URL": "http://a:9000", "AWS_ENDPOINT_URL_S3": "http://b:9000"}, "http://b:9000"),
        ({"AWS_ENDPOINT_URL": "https://a"}, None),
    ],
)
def test_only_a_server_that_speaks_plain_http_can_be_disturbed(
    environment: dict[str, str], endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert endpoint_of_environment() == endpoint


def test_requests_pass_unchanged(proxy: FaultyProxy, upstream: Upstream) -> None:
    assert ask(proxy) == (200, b"hello") and proxy.num_disturbed == 0
    # The signature covers the name that the client uses.
    assert f"Host: {proxy.endpoint.removeprefix('http://')}".encode() in upstream.requests[0]


@pytest.mark.parametrize(("method", "has_body"), [("GET", True), ("PUT", True), ("HEAD", False)])
def test_a_busy_server_answers_503(method: str, has_body: bool, proxy: FaultyProxy, upstream: Upstream) -> None:
    proxy.disturb("busy", 60)
    status, body = ask(proxy, method)
    assert status == 503 and (b"SlowDown" in body) is has_body
    assert upstream.requests == [] and proxy.num_disturbed == 1


def test_an_answer_to_head_has_no_body(proxy: FaultyProxy) -> None:
    """Clients of the standard library ignore one; others read it as the next answer."""
    proxy.disturb("busy", 60)
    host, port = proxy.endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"HEAD /bucket/key HTTP/1.1\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503 ") and answer.endswith(b"\r\n\r\n")


def test_a_broken_connection_is_reset(proxy: FaultyProxy, upstream: Upstream) -> None:
    proxy.disturb("broken", 60)
    with pytest.raises(ConnectionError):
        ask(proxy)
    assert upstream.requests == [] and proxy.num_disturbed == 1


def test_a_silent_server_answers_once_the_fault_is_over(proxy: FaultyProxy) -> None:
    proxy.disturb("silent", 0.1)
    began = time.monotonic()
    assert ask(proxy) == (200, b"hello")
    assert time.monotonic() - began >= 0.1 and proxy.num_disturbed == 1


def test_a_fault_ends_by_itself(proxy: FaultyProxy) -> None:
    proxy.disturb("busy", 0.0)
    assert ask(proxy) == (200, b"hello")


def test_connections_that_clients_keep_open_end_with_the_proxy(
    upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultyProxy(upstream.url) as proxy:
        host, port = proxy.endpoint.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)), timeout=10)
        deadline = time.monotonic() + 10
        while not upstream.num_accepted and time.monotonic() < deadline:
            time.sleep(0.001)
    with client, pytest.raises(ConnectionResetError):
        client.recv(100)
    del proxy
    gc.collect()
    assert caplog.text == ""


def test_without_a_server_connections_are_reset(proxy: FaultyProxy, upstream: Upstream) -> None:
    port = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{port.getsockname()[1]}"
    port.close()
    with FaultyProxy(url) as other, pytest.raises(ConnectionError):
        ask(other)
