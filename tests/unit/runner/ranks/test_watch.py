"""Ranks as processes: their messages, their deaths, and the evidence that they leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forged import forged
from hypothesis import HealthCheck, given, settings

from checkpointing.host.threads import is_readable
from runner.ranks.output import STDERR_NAME
from runner.ranks.watch import Done, Failed, RankEvents, RankMessage, RankWatch, Started
from runner.recovery.classify import RankEnd
from runner.training.rank import EventSender

EFFECT = "RuntimeError: Connection closed by peer"
OWN = "ValueError: bad sample"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def started(rank: int, pid: int, error_file: str = "") -> Started:
    return Started(event="rank_started", in_attempt=1, rank=rank, local_rank=rank, pid=pid, error_file=error_file)


class Folder:
    """The files of one rank."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.error_file, self.log = path / "error.json", path / STDERR_NAME

    def error(self, text: str) -> None:
        extra = {"py_callstack": 'File "train.py", line 7, in step', "timestamp": "12"}
        self.error_file.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def test_a_death_is_noticed_and_is_a_failure_unless_it_was_announced(sleeper: subprocess.Popen[bytes]) -> None:
    watch = RankWatch()
    pidfd = watch.started(started(3, sleeper.pid))
    assert pidfd is not None and watch.pidfds == {pidfd: 3} and not watch.failures
    watch.kill(signal.SIGTERM)
    assert is_readable(pidfd, 5.0)
    watch.died(pidfd)
    assert (watch.failures, watch.deaths, watch.pidfds) == ([3], [3], {})
    watch.preempted.add(3)
    assert watch.failures == []
    assert sleeper.wait() == -signal.SIGTERM


def test_a_rank_that_has_died_before_its_message_is_read() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    watch = RankWatch()
    assert watch.started(started(1, process.pid)) is None
    assert watch.failures == [1]


def test_closing_leaves_the_processes_alone(sleeper: subprocess.Popen[bytes]) -> None:
    watch = RankWatch()
    watch.started(started(0, sleeper.pid))
    watch.close()
    watch.kill()
    assert sleeper.poll() is None and not watch.pidfds


@pytest.mark.parametrize(
    ("reported", "file", "words", "known"),
    [
        (None, None, "", True),
        (OWN, None, "", True),
        (EFFECT, None, "", False),
        # torchrun's file has the exception itself, and counts for more than the rank's own message.
        (OWN, EFFECT, "", False),
        (EFFECT, OWN, "", True),
        (None, None, f"terminate called after throwing an instance of 'E'\n  what():  {EFFECT}\n", False),
    ],
)
def test_when_the_cause_is_known(
    tmp_path: Path, reported: str | None, file: str | None, words: str, known: bool
) -> None:
    folder = Folder(tmp_path / "0")
    if file is not None:
        folder.error(file)
    folder.log.write_text(words)
    watch = RankWatch(error_files={0: str(folder.error_file)}, deaths=[0])
    if reported is not None:
        watch.errors[0] = (reported, None, False)
    assert watch.cause_known is known


def test_nothing_is_known_before_a_rank_has_failed() -> None:
    assert not RankWatch(deaths=[0], done={0}).cause_known


def test_how_ranks_ended_in_the_order_of_their_deaths(tmp_path: Path) -> None:
    folders = [Folder(tmp_path / str(rank)) for rank in range(4)]
    folders[0].error(OWN)
    folders[2].log.write_text("Fatal Python error: Segmentation fault\n")
    watch = RankWatch(
        error_files={rank: str(folder.error_file) for rank, folder in enumerate(folders)},
        deaths=[1, 3, 0],
        done={3},
        errors={1: (EFFECT, "gloo.py:3", True), 0: ("reported", None, True)},
    )
    report = [{"rank": 0, "exit_code": 1, "error_file": ""}, {"rank": 2, "exit_code": -11, "error_file": ""}]
    assert watch.ends(report) == [
        RankEnd(1, 0, None, EFFECT, "gloo.py:3", transient=True),
        RankEnd(0, 1, 1, OWN, "train.py:7", 12.0, transient=True),
        # Only the launcher saw it end.
        RankEnd(2, 2, -11, last_words="Fatal Python error: Segmentation fault"),
    ]


def test_the_log_of_a_rank() -> None:
    watch = RankWatch(error_files={0: "/logs/0/error.json", 1: ""})
    assert watch.log(0) == Path("/logs/0") / STDERR_NAME
    assert [watch.log(rank) for rank in (1, 2, None)] == [None] * 3


NAMES = ["event", "in_attempt", "rank", "local_rank", "pid", "error_file", "error", "frame", "transient", "step"]
WORDS = [
    "rank_started",
    "rank_done",
    "rank_failed",
    "stop_signal",
    "best_model",
    "run_ended",
    0,
    1,
    99999999,
    2**64,
    "\0",
]


@pytest.fixture
def events(tmp_path: Path) -> Iterator[RankEvents]:
    events = RankEvents(tmp_path)
    yield events
    events.close()


def received(events: RankEvents, data: bytes) -> list[RankMessage]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, events.path)
    return events.receive()


def test_what_is_no_message_of_a_rank_is_passed_over(events: RankEvents) -> None:
    """Any process of the same user can write there."""
    done = {"event": "rank_done", "in_attempt": 1, "rank": 0}
    noise = [b"", b"\xff", b"3", b"[]", b"[" * 30_000, b'{"event": 3}', b'{"event": "rank_done"}']
    noise += [
        json.dumps({**done, **wrong}).encode() for wrong in ({"rank": "0"}, {"rank": 1e999}, {"in_attempt": None})
    ]
    # A reader of the journal would take it for the end of the run.
    noise += [json.dumps({"event": "run_ended", "in_attempt": 1, "exit_code": 0}).encode()]
    assert [received(events, data) for data in noise] == [[]] * len(noise)
    assert received(events, json.dumps(done).encode()) == [Done(event="rank_done", in_attempt=1, rank=0)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(forged(NAMES, WORDS))
def test_whatever_comes_is_a_message_or_passed_over(events: RankEvents, data: bytes) -> None:
    watch = RankWatch()
    for message in received(events, data):
        if isinstance(message, Started):
            watch.started(message)
            assert watch.cause_known in (True, False)
            watch.close()


@pytest.mark.parametrize(
    ("event", "details"),
    [
        ("rank_started", {"rank": 1, "local_rank": 0, "pid": os.getpid(), "error_file": ""}),
        ("rank_done", {"rank": 1}),
        ("rank_preempted", {"rank": 1}),
        ("rank_failed", {"rank": 1, "error": "ValueError: no", "frame": None, "transient": False}),
        ("stop_signal", {"rank": 1}),
        ("best_model", {"step": 20}),
    ],
)
def test_every_message_that_ranks_send_is_one(events: RankEvents, event: str, details: dict[str, Any]) -> None:
    EventSender(events.path, 3).send_surely(event, **details)
    assert [message.model_dump() for message in events.receive()] == [{"event": event, "in_attempt": 3, **details}]


def test_an_error_that_quotes_a_name_that_is_not_utf8_arrives(events: RankEvents) -> None:
    EventSender(events.path, 3).send_surely("rank_failed", rank=0, error="no file \udcff", frame=None, transient=False)
    assert [message.error for message in events.receive() if isinstance(message, Failed)] == ["no file \\udcff"]
