"""Which events of a run become notifications, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.journals import entry

from runner.session.notifications import Notification, Notifications

ALL = ("failed", "stuck", "resumed", "finished", "preempted")
END = {"kind": "crashed", "start_step": 0, "committed_step": 20}


def told(*events: tuple[str, int, dict[str, Any]], wanted: tuple[str, ...] = ALL) -> list[Notification]:
    notifications = Notifications("r1", "my-run", "gpu-3", wanted)
    taken = [notifications.take(entry(10.0, name, attempt, **details)) for name, attempt, details in events]
    return [one for one in taken if one is not None]


def test_a_first_attempt_that_finishes_is_one_message() -> None:
    (one,) = told(
        ("run_started", 0, {}),
        ("training_started", 1, {"step": 0}),
        ("log", 1, {"step": 40, "loss": 1.0}),
        ("committed", 1, {"step": 40, "tier": "local"}),
        ("attempt_ended", 1, {**END, "kind": "finished", "cause": "finished", "step": 41, "committed_step": 41}),
        ("run_ended", 1, {"state": "finished", "exit_code": 0, "reason": "finished"}),
    )
    assert one.text == "[my-run] finished at step 41; newest checkpoint: step 41 (attempt 1, gpu-3)"
    assert one.kind == "finished" and one.time == 10.0
    facts = {"run_id": "r1", "run": "my-run", "host": "gpu-3", "attempt": 1, "step": 41, "committed_step": 41}
    assert one.facts == {**facts, "reason": "finished", "exit_code": 0}


def test_a_restart_is_told_once_with_its_cause() -> None:
    texts = told(
        ("training_started", 1, {"step": 0}),
        ("attempt_ended", 1, {**END, "cause": "rank 1 was killed by SIGKILL", "step": 25}),
        ("training_started", 2, {"step": 24}),
        # A second trainer of the script.
        ("training_started", 2, {"step": 0, "stage": "b", "run_step": 40}),
    )
    assert [one.text for one in texts] == [
        "[my-run] resumed from step 24 after: rank 1 was killed by SIGKILL; newest checkpoint: step 20 "
        "(attempt 2, gpu-3)"
    ]


def test_a_session_that_continues_a_run_says_so() -> None:
    (one,) = told(("run_started", 1, {"committed_step": 20}), ("training_started", 2, {"step": 20}))
    assert "resumed from step 20 after: the runner was started again; newest checkpoint: step 20" in one.text


def test_a_node_that_takes_the_lead_says_why_the_run_resumes() -> None:
    (one,) = told(
        ("run_started", 1, {"committed_step": 20}),
        ("leader_changed", 1, {"epoch": 2, "node": 1, "host": "b"}),
        ("training_started", 2, {"step": 20}),
    )
    assert "resumed from step 20 after: the leader was lost, and node 1 leads;" in one.text


@pytest.mark.parametrize(("state", "kind"), [("preempted", "preempted"), ("failed", "failed"), ("new", "failed")])
def test_ends_that_are_not_good(state: str, kind: str) -> None:
    (one,) = told(("run_ended", 1, {"state": state, "exit_code": 76, "reason": "5 restarts"}))
    assert one.text == f"[my-run] {kind} at step 0: 5 restarts; no checkpoint (attempt 1, gpu-3)"
    assert (one.kind, one.facts["exit_code"]) == (kind, 76)


def test_ranks_that_hang() -> None:
    (one,) = told(
        ("progress", 1, {"step": 7}), ("hang", 1, {"ranks": [0, 1], "reason": "step 8 takes 9 s", "stacks": []})
    )
    assert one.text.startswith("[my-run] stuck at step 7: rank 0, 1: step 8 takes 9 s;")


def test_only_what_is_wanted_is_told() -> None:
    end = ("run_ended", 1, {"state": "finished", "exit_code": 0})
    assert told(end, wanted=("failed", "stuck")) == [] and len(told(end, wanted=("finished",))) == 1


def test_reasons_are_cut_and_neither_command_a_terminal_nor_repeat_a_token() -> None:
    reason = "KeyError: \x1b[2J token=hf_abcdefghijKLMNOPQRST0123456789 " + "x " * 1000
    (one,) = told(("run_ended", 1, {"state": "failed", "exit_code": 78, "reason": reason}))
    assert "\x1b" not in one.text and "hf_abc" not in one.text and len(one.text) < 800


def test_bodies() -> None:
    one = Notification("failed", "<a> & b", {"step": 3}, 0.5)
    assert json.loads(one.body("slack")) == {"text": "&lt;a&gt; &amp; b"}
    assert json.loads(one.body("json")) == {
        "type": "run.failed",
        "timestamp": "1970-01-01T00:00:00.500Z",
        "data": {"step": 3, "text": "<a> & b"},
    }
    assert one.id != Notification("failed", "", {}, 0.5).id
