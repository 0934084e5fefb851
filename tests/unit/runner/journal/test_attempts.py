"""An attempt's specification from the network, and its result in the journal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.node_fakes import ended
from pydantic import TypeAdapter, ValidationError

from runner.journal.attempts import AttemptSpec
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind

SPEC: dict[str, Any] = {"attempt": 3, "nnodes": 2, "skipped": "5-9", "lineage": "abc", "allow_changes": True}


def read(fields: dict[str, Any]) -> AttemptSpec:
    return TypeAdapter(AttemptSpec).validate_json(json.dumps(fields))


def test_a_specification_of_a_newer_version_is_read() -> None:
    assert read({**SPEC, "of a later version": 1}) == AttemptSpec(
        3, 2, skipped="5-9", lineage="abc", allow_changes=True
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": -1},
        {"attempt": "3"},
        {"nnodes": 0},
        {"divisor": 0},
        {"skipped": "x" * 10_001},
        {"lost_steps": 2**53},
    ],
)
def test_what_is_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read({**SPEC, **wrong})


@pytest.mark.parametrize(("kind", "failed_at"), [(FailureKind.CRASHED, 9.0), (FailureKind.PREEMPTED, 0.0)])
def test_the_event_has_the_failure_of_all_nodes(kind: FailureKind, failed_at: float) -> None:
    result = ended(FailureKind.ENDED, 10)
    result = type(result)(result.failure, start_step=4, training_began=1.0, last_step_at=8.0, failed_at=9.0)
    event = result.event(Failure(kind, "cause", 3, 12), 8)
    assert (event.kind, event.cause, event.rank, event.step) == (kind.value, "cause", 3, 12)
    assert (event.start_step, event.committed_step, event.failed_at) == (4, 8, failed_at)
