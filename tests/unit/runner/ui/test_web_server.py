"""A server for strangers; what they cost is tested at the metrics' port, too."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from runner.ui.web_server import web_server


def answer(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


@contextlib.contextmanager
def serving(address: str) -> Iterator[int]:
    with web_server(address, 0, answer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("address", "url"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_requests_are_answered_at_either_kind_of_address(
    address: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(address) as port, urllib.request.urlopen(f"http://{url}:{port}/x", timeout=30) as found:
        assert found.read() == b"/x"
    assert capfd.readouterr() == ("", ""), "the console is the run's"


def test_a_crowd_is_shown_out_and_the_next_one_answered() -> None:
    with serving("127.0.0.1") as port:
        with contextlib.ExitStack() as held:
            crowd = [held.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(17)]
            # Sixteen are waited for; the last one is closed.
            assert crowd[-1].recv(1) == b""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/y", timeout=30) as found:
            assert found.read() == b"/y"
