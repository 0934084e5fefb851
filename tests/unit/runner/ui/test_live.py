"""A report that is served: who gets it, and what it costs the machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from runner.errors import UsageError
from runner.ui.live import LivePage, serve

LOOPBACK = "127.0.0.1:8080"


def ask(page: LivePage, path: str, host: str = LOOPBACK, method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    answers: list[tuple[str, list[tuple[str, str]]]] = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "HTTP_HOST": host}
    body = b"".join(page(environ, lambda status, headers: answers.append((status, headers))))
    ((status, headers),) = answers
    return int(status.split()[0]), body, dict(headers)


def live(render: Callable[[float], str] = lambda live_s: "the page") -> LivePage:
    return LivePage(render)


def test_who_knows_the_address_gets_the_page() -> None:
    page = live()
    for host in (LOOPBACK, "localhost:1234", "[::1]:80", "127.0.0.1"):
        status, body, headers = ask(page, page.path, host)
        assert (status, body) == (200, b"the page")
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert ask(page, page.path, method="HEAD")[1] == b""
    assert len(page.path) > 40 and page.path != live().path


@pytest.mark.parametrize(
    "change",
    [
        lambda path: "/",
        lambda path: "",
        lambda path: path[:-1],
        lambda path: path[:-2] + "/",
        lambda path: path + "journal.jsonl",
        lambda path: path + "../etc/passwd",
        lambda path: "/../../etc/passwd",
        lambda path: path.swapcase(),
        lambda path: "/\udcff\u20ac/",
    ],
)
def test_nobody_else_gets_anything(change: Callable[[str], str]) -> None:
    page = live()
    status, body, _ = ask(page, change(page.path))
    assert status == 403 and b"the page" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.", "", "[", "10.0.0.1"]
)
def test_a_name_of_another_host_is_refused(host: str) -> None:
    """DNS rebinding: a page of that host's would read the answer."""
    page = live()
    assert ask(page, page.path, host)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(method: str) -> None:
    page = live()
    assert ask(page, page.path, method=method)[0] == 405


def test_a_page_is_made_when_it_is_asked_for_and_served_for_a_while() -> None:
    now, took, made = [0.0], [0.0], list[float]()

    def render(live_s: float) -> str:
        made.append(live_s)
        took[0] += 0.5
        return f"page {len(made)}"

    page = LivePage(render, lambda: now[0], lambda: took[0])
    assert made == []
    assert ask(page, page.path)[1] == ask(page, page.path)[1] == b"page 1"
    now[0] = 9.9
    assert ask(page, page.path)[1] == b"page 1", "twenty times the half second that it took"
    now[0] = 10.1
    assert ask(page, page.path)[1] == b"page 2" and made == [2.0, 10.0]
    # Those that nobody may see cost nothing.
    now[0] = 100.0
    ask(page, "/")
    assert len(made) == 2


def test_a_journal_that_cannot_be_read_now_can_be_read_later() -> None:
    errors: list[Exception] = [UsageError("no route to s3://secret"), OSError(5, "Input/output error")]

    def render(live_s: float) -> str:
        if errors:
            raise errors.pop()
        return "the page"

    page = live(render)
    for _ in range(2):
        status, body, _ = ask(page, page.path)
        assert status == 503 and b"secret" not in body
    assert ask(page, page.path)[:2] == (200, b"the page")


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said: list[Any] = []
        with pytest.raises(UsageError, match=f"--port {port} cannot be used: Address already in use; choose another"):
            serve(port, lambda live_s: "", said.append)
        assert said == []
