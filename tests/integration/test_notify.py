"""Notifications of real runs, as a receiver on a real port gets them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.receiver import Receiver, answer, receiver
from integration.support import Run, troubled, wait_for_commit, wait_until

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def served() -> Iterator[Receiver]:
    with receiver() as one:
        yield one


def started(folder: Path, url: str, script: list[str], *settings: str) -> Run:
    more = [part for setting in settings for part in ("--set", setting)]
    return Run(folder / "run", "--nproc-per-node", "1", *more, script=script).start(RUNNER_NOTIFY_URL=url)


def files_with(folder: Path, secret: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_killed_rank_a_preemption_and_the_end(served: Receiver, tmp_path: Path) -> None:
    script = troubled(tmp_path / "job", crawl=10)
    run = started(tmp_path, served.url, script)
    wait_for_commit(run, 10)
    run.wait_for_step(10)
    os.kill(run.rank_pid(0), signal.SIGKILL)
    wait_until(run, lambda: served.kinds)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert served.kinds == ["run.resumed", "run.preempted"]
    first, second = (message["data"] for message in served.messages)
    assert first["attempt"] == 2 and "SIGKILL" in first["text"] and first["run_id"] == run.run_id()
    assert second["exit_code"] == 75 and second["committed_step"] == second["step"] >= 10
    assert "SIGTERM" in second["text"] or "stopped on request" in second["text"]
    run = started(tmp_path, served.url, script)
    assert run.finish() == 0, run.output
    assert served.kinds[2:] == ["run.resumed", "run.finished"]
    third, last = (message["data"] for message in served.messages[2:])
    assert third["step"] == second["step"] and third["reason"] == "the runner was started again"
    assert (last["step"], last["committed_step"], last["exit_code"]) == (40, 40, 0)
    assert not files_with(tmp_path / "run", "t0ken") and "t0ken" not in run.output


def test_a_failure_that_repeats_reaches_slack_alone(served: Receiver, tmp_path: Path) -> None:
    script = troubled(tmp_path / "job", "def at_step(step, args):\n    if step == 3: raise KeyError('<lost> & found')")
    settings = ("notify.format=slack", "notify.events=[failed]")
    run = started(tmp_path, served.url, script, *settings)
    code = run.finish()
    assert code not in (0, 75), run.output
    [(_, body)] = served.requests
    message = json.loads(body)
    assert message.keys() == {"text"} and message["text"].startswith("[run] failed at step ")
    assert "KeyError" in message["text"] and "&lt;lost&gt; &amp; found" in message["text"], message


def test_a_receiver_that_is_broken_costs_one_line(tmp_path: Path) -> None:
    script = troubled(
        tmp_path / "job", "def at_step(step, args):\n    if step == 12 and ATTEMPT == 1: os.kill(os.getpid(), 9)"
    )
    with receiver(answer(404)) as broken:
        run = started(tmp_path, broken.url, script)
        assert run.finish() == 0, run.output
        assert len(broken.requests) == 2
    assert run.output.count("notification not delivered (resumed): HTTP status 404") == 1
    assert run.output.count("notification") == 1, run.output


def test_a_key_that_is_missing_is_found_before_anything_starts(tmp_path: Path) -> None:
    run = started(tmp_path, "https://host/t0ken", troubled(tmp_path / "job"), "notify.secret_env=NO_SUCH")
    assert run.finish() == 2 and "notify.secret_env: the variable NO_SUCH is not set" in run.output, run.output
    assert not (tmp_path / "run").exists() and "Traceback" not in run.output


def test_ranks_that_hang_are_reported_before_they_resume(served: Receiver, tmp_path: Path) -> None:
    trouble = "def at_step(step, args):\n    if step == 12 and ATTEMPT == 1: time.sleep(600)"
    run = started(tmp_path, served.url, troubled(tmp_path / "job", trouble), "restart.hang_timeout_s=4")
    assert run.finish() == 0, run.output
    assert served.kinds == ["run.stuck", "run.resumed", "run.finished"]
    first, second = (message["data"] for message in served.messages[:2])
    assert first["ranks"] == [0] and "rank 0" in first["text"] and "hung" in second["reason"], served.messages
