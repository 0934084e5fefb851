"""Messages between nodes: whatever arrives is one of them, or refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from helpers.forged import forged
from hypothesis import given

from checkpointing.agent.events import BatchShape, Committed, Log, Resumed, SlowRanks, TrainingStarted
from runner.journal.attempts import AttemptSpec
from runner.peers.messages import (
    Begin,
    Busy,
    Ended,
    Finish,
    Forwarded,
    Hello,
    Ready,
    StopRun,
    Welcome,
    read_by_leader,
    read_by_member,
)
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind

NAMES = ["do", "node_rank", "job", "attempt", "failure", "event", "details", "reason", "busy", "exit_code", "stacks"]
WORDS = ["hello", "ready", "ended", "event", "stop", "busy", "ping", "welcome", "begin", "end", "finish", "log"]
FORGED = forged(NAMES, WORDS)


@given(FORGED)
def test_whatever_comes_is_a_message_or_refused(line: bytes) -> None:
    for read in (read_by_leader, read_by_member):
        with contextlib.suppress(ValueError):
            message = read(line)
            assert read(message.encode()) == message


def test_every_message_that_we_send_is_one() -> None:
    begin = Begin(spec=AttemptSpec(3, 2, 2, "3-5", "1:20", "abc", 4, 40, "/from", True))
    assert read_by_member(begin.encode()) == begin
    log = Log(step=3, loss=1.5, metrics={"tokens_per_s": 7.0}, stage="stage-2", run_step=9)
    others = [TrainingStarted(step=0, total_steps=None), BatchShape(micro_batch=2, accumulation=1)]
    others.append(SlowRanks(ranks=[3], ratios=[1.5], nodes=[1]))
    for event in (log, Resumed(step=3, source="memory"), *others):
        forwarded = Forwarded(attempt=1, event=event)
        assert read_by_leader(forwarded.encode()) == forwarded
    for message in (Hello(node_rank=1, job="{}"), Ready(nproc=4), Busy(busy=True), StopRun(reason="SIGTERM")):
        assert read_by_leader(message.encode()) == message
    ended = Ended(attempt=2, failure=Failure(FailureKind.SPIKE, "why", 3, 7, "print", (5, 7), may_pass=True))
    assert read_by_leader(ended.encode()) == ended
    for answer in (Welcome(run_id="a-b_c.1"), Finish(exit_code=80, reason="why"), Busy(busy=False)):
        assert read_by_member(answer.encode()) == answer


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "wrong",
    [
        line(do="welcome", run_id="run"),
        line(do="hello", node_rank="1"),
        line(do="ready", nproc=0),
        line(do="ended", attempt=1, failure=None),
        line(do="ended", attempt=1, failure={"kind": "crashed"}),
        line(do="event", attempt=1, event="log"),
        # Only what rank 0 reports is forwarded: a node cannot claim commits.
        line(do="event", attempt=1, event=Committed(step=9).to_dict()),
        line(do="event", attempt=1, event={"event": "log", "step": "x"}),
        line(do="event", attempt=1, event={"event": "slow_ranks", "ranks": [1, 2], "ratios": [2.0], "nodes": [0, 0]}),
        b"{",
    ],
)
def test_what_no_node_sends_to_the_leader(wrong: bytes) -> None:
    with pytest.raises(ValueError):
        read_by_leader(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        line(do="hello", node_rank=1),
        line(do="welcome", run_id="../run"),
        line(do="begin", spec={"attempt": 1}),
        line(do="finish", exit_code=1),
    ],
)
def test_what_no_leader_sends_to_a_node(wrong: bytes) -> None:
    with pytest.raises(ValueError):
        read_by_member(wrong)
