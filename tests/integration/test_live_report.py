"""A report that is served while a script trains that nobody has edited, in a real browser."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from integration.support import RUNNER, Run, troubled

# It needs the browser, and the processors.
pytestmark = pytest.mark.xdist_group("report")
# It waits before it logs these steps.
GATES = (10, 30)
WAITS = f"""
def at_step(step, args):
    while step in {GATES} and not os.path.exists(FOLDER + f".{{step}}"):
        time.sleep(0.02)
"""
EVALUATES = "eval_strategy='steps', eval_steps=10, load_best_model_at_end=True"


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Run]:
    """A run of 40 steps that stands still at each gate."""
    lines = troubled(tmp_path, WAITS, EVALUATES)
    run = Run(tmp_path / "run", "--set", "restart.hang_timeout_s=600", script=lines).start()
    yield run
    if run.process is not None and run.process.poll() is None:
        run.end()


def open_gate(folder: Path, step: int) -> None:
    (folder / f"hf.{step}").touch()


@contextlib.contextmanager
def served(run: Run, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of its report, and the process that serves it."""
    command = [*RUNNER, "report", str(run.folder), "--serve", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0], process
    finally:
        process.kill()
        process.communicate()


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_page_follows_the_run(waiting: Run, browser: Any, tmp_path: Path) -> None:
    waiting.wait_for_step(5)
    page = browser.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    with served(waiting) as (url, process):
        page.goto(url)
        page.evaluate("window.opened = 'once'")
        loss = page.locator("#loss-now")
        assert re.match(r"\d of 40", page.locator("#steps").inner_text()) and page.title().endswith("running")
        before = loss.inner_text()
        open_gate(tmp_path, 10)
        page.locator("#steps", has_text=re.compile(r"^2\d of 40")).wait_for(timeout=300_000)
        assert loss.inner_text() != before and page.locator("#committed").inner_text() == "2"
        open_gate(tmp_path, 30)
        page.locator("#state", has_text="finished").wait_for(timeout=300_000)
        assert page.locator("#steps").inner_text() == "40 of 40" and page.title().endswith("finished")
        assert page.evaluate("window.opened") == "once", "without being loaded again"
        assert (
            page.locator("#attempts-table tbody tr").count() == 1 and page.locator("#goodput").inner_text() != "0.0 %"
        )
        # What was missing for scripts of users.
        evaluated = {event["step"]: event["eval_loss"] for event in waiting.events("evaluated")}
        assert len(evaluated) == 4
        best = min(evaluated, key=lambda step: evaluated[step])
        assert page.locator("#best").inner_text() == f"step {best}"
        assert page.locator("#eval-loss").inner_text() == f"{evaluated[40]:.4f}"
        assert page.locator("#chart-memory svg").is_visible() and page.locator("#chart-throughput svg").is_visible()

        # Nobody else gets it, and nobody gets anything else.
        root = f"http://{urlsplit(url).netloc}"
        for other in (
            root,
            f"{root}/",
            f"{url}journal.jsonl",
            f"{root}/..%2f..%2fetc/passwd",
            f"{url}x",
            url[:-2] + "/",
        ):
            assert status_of(other) == 403, other
        assert status_of(url, Host="evil.example") == 403 and status_of(url, Host="localhost") == 200
        assert urlsplit(url).hostname == "127.0.0.1" and not troubles

        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and errors == "", errors
        page.locator(".live.bad", has_text="not up to date").wait_for(timeout=60_000)
    assert waiting.finish() == 0, waiting.output
    done = subprocess.run([*RUNNER, "report", str(waiting.folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and (waiting.folder / "report.html").stat().st_size < 100_000


def test_serving_leaves_the_run_alone(waiting: Run, tmp_path: Path) -> None:
    """It gives way to the run where processor or memory is short, and writes no file."""
    waiting.wait_for_step(5)
    before = {path for path in waiting.folder.rglob("*") if path.is_file()}
    with served(waiting, "--price-per-hour", "2") as (url, process):
        assert status_of(url) == 200
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 10
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "1000\n"
    assert before == {path for path in waiting.folder.rglob("*") if path.is_file()}


def test_a_terminal_is_refreshed_in_place_and_a_pipe_gets_lines(waiting: Run, tmp_path: Path) -> None:
    waiting.wait_for_step(5)
    watch = [*RUNNER, "status", str(waiting.folder), "--watch"]
    own, terminal = pty.openpty()
    on_terminal = subprocess.Popen(watch, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    interrupted = subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    piped = subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert piped.stdout is not None and interrupted.stdout is not None
    assert " running · step " in piped.stdout.readline() and interrupted.stdout.readline()
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 0 and errors == "", errors
    seen = read_for(own, 3.0)
    for step in GATES:
        open_gate(tmp_path, step)
    assert waiting.finish() == 0, waiting.output
    seen += read_for(own, 60.0)
    assert on_terminal.wait(60) == 0
    # The cursor goes up, and lines are erased.
    assert b"\x1b[1A\x1b[2K" in seen and b"finished" in seen
    output, errors = piped.communicate(timeout=60)
    lines = output.splitlines()
    assert piped.returncode == 0 and errors == "" and "\x1b" not in output
    assert lines and " finished · step 40 of 40 · " in lines[-1] and len(lines) == len({line[20:] for line in lines})


def read_for(terminal: int, seconds: float) -> bytes:
    """Return what a terminal shows until it is closed, for some seconds at most."""
    seen, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([terminal], [], [], left)
        try:
            piece = os.read(terminal, 65536) if ready else b""
        except OSError:
            break
        if not piece:
            break
        seen += piece
    return seen
