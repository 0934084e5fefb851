"""What ranks tell their supervisor: checked before anybody looks at it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forged import forged
from hypothesis import HealthCheck, given, settings

from runner.ranks.messages import Done, Failed, RankMessage, Started
from runner.ranks.watch import RankEvents, RankWatch
from runner.training.event_sender import EventSender

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
    EventSender(events.path, 3).send(event, **details)
    assert [message.model_dump() for message in events.receive()] == [{"event": event, "in_attempt": 3, **details}]


def test_an_error_that_quotes_a_name_that_is_not_utf8_arrives(events: RankEvents) -> None:
    EventSender(events.path, 3).send("rank_failed", rank=0, error="no file \udcff", frame=None, transient=False)
    assert [message.error for message in events.receive() if isinstance(message, Failed)] == ["no file \\udcff"]
