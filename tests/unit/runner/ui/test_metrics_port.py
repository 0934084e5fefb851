"""What a stranger can do at the metrics' port, and what he learns there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from infra.ports import free_port

from checkpointing.agent.events import CommitFailedEvent, Committed
from runner.journal.journal import Journal
from runner.ui.prometheus import RunCollector, serve

# Connections that a stranger leaves open, and threads of the process that may have come for them.
NUM_OPEN, MOST_THREADS = 60, 32


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> int:
    journal = tmp_path_factory.mktemp("run") / "journal.jsonl"
    book = Journal(journal, lambda: 1.0)
    book.append(Committed(step=7), 1)
    book.append(CommitFailedEvent(step=8, error="/home/user/secret place: Permission denied"), 1)
    book.close()
    found = free_port()
    serve("127.0.0.1", found, RunCollector(journal))
    return found


def ask(port: int, path: str, data: bytes | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_it_answers_by_figures_alone(port: int) -> None:
    for path in ("/metrics", "/../../etc/passwd", "/metrics?name[]=x"):
        status, text = ask(port, path)
        assert status == 200 and "root:" not in text and "secret place" not in text
        assert all(line.startswith(("#", "runner_")) for line in text.splitlines())
    assert "runner_checkpoint_step" in ask(port, "/metrics")[1]


def test_nothing_can_be_sent_to_it(port: int) -> None:
    assert ask(port, "/metrics", b"x" * 100)[0] == 405


def test_connections_that_say_nothing_cost_few_threads(port: int) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as held:
        for _ in range(NUM_OPEN):
            held.enter_context(socket.create_connection(("127.0.0.1", port), 30)).sendall(b"GET /metrics HTTP/1.0\r\n")
            # The queue of those that wait to be accepted is short; who finds it full tries again after a second.
            time.sleep(0.005)
        assert threading.active_count() - before < MOST_THREADS
    # It answers again once their threads have noticed that they are gone.
    while threading.active_count() > before:
        time.sleep(0.01)
    assert ask(port, "/metrics")[0] == 200
