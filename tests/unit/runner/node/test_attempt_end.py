"""Why an attempt ended on a node: which of several explanations takes precedence."""

from __future__ import annotations

from typing import Any

import pytest

from runner.node.attempt_end import AttemptEnd, failure_of, storage_failed
from runner.recovery.classify import RankEnd
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind

FINISHED: dict[str, Any] = {"finished": True, "failures": []}
FAILED: dict[str, Any] = {"finished": False, "failures": []}
VERDICT = Failure(FailureKind.HUNG, "rank 1 hung")
OWN = RankEnd(0, 0, 1, "ValueError: bad sample", "f.py:3")
PREEMPTED = RankEnd(0, 0, 75)


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        (AttemptEnd(FINISHED), FailureKind.FINISHED, "all ranks finished"),
        # All ranks were done before this runner's verdict, or the limit of failed saves, could end them.
        (AttemptEnd(FINISHED, verdict=VERDICT), FailureKind.FINISHED, ""),
        (AttemptEnd(FINISHED, failed_saves=(3, "503"), max_failed_saves=3), FailureKind.FINISHED, ""),
        (AttemptEnd(FAILED, [OWN], step=5), FailureKind.CRASHED, "bad sample"),
        (AttemptEnd(FAILED, [OWN], step=5, verdict=VERDICT), FailureKind.HUNG, "rank 1 hung"),
        # Training ends in good order, but because of the storage.
        (
            AttemptEnd(FAILED, [PREEMPTED], failed_saves=(3, "503"), max_failed_saves=3, stop_known=True),
            FailureKind.STORAGE_FAILED,
            "3 saves in a row failed (checkpoint.max_failed_saves), the last one: 503",
        ),
        (AttemptEnd(FAILED, [OWN], step=5, failed_saves=(2, "503"), max_failed_saves=3), FailureKind.CRASHED, "sample"),
        (AttemptEnd(FAILED, [PREEMPTED], step=5, stop_known=True), FailureKind.PREEMPTED, "checkpoint committed"),
        (AttemptEnd(FAILED, [PREEMPTED], step=5, asked=frozenset({0})), FailureKind.PREEMPTED, ""),
        (AttemptEnd(FAILED, [PREEMPTED], step=5), FailureKind.CRASHED, "no stop was requested"),
        # A script that ends with 0 after SIGTERM need not have trained to its end.
        (AttemptEnd(FINISHED, script_signalled=True), FailureKind.PREEMPTED, "in answer to SIGTERM"),
        (AttemptEnd({**FAILED, "launcher_lost": True}, [OWN]), FailureKind.LAUNCHER_LOST, "the launcher died"),
        (AttemptEnd(FAILED), FailureKind.LAUNCHER_LOST, "without a report"),
        (AttemptEnd({**FAILED, "error": "OSError: port taken"}), FailureKind.LAUNCHER_LOST, "OSError: port taken"),
        (
            AttemptEnd({**FAILED, "error": "/out/logs/attempt-2 cannot be created: No space left on device"}),
            FailureKind.STORAGE_FAILED,
            "No space left on device; make room",
        ),
        # The launcher's own error explains nothing if a rank has one.
        (AttemptEnd({**FAILED, "error": "RuntimeError"}, [OWN], step=5), FailureKind.CRASHED, "bad sample"),
        (AttemptEnd(FAILED, [RankEnd(0, 0, -9)], step=5, kernel_oom_kills=1), FailureKind.OUT_OF_MEMORY, "kernel"),
    ],
)
def test_precedence(end: AttemptEnd, kind: FailureKind, text: str) -> None:
    failure = failure_of(end)
    assert failure.kind is kind and text in failure.cause


def test_a_reserved_status_without_a_stop_request_is_deterministic() -> None:
    """Twice in a row it ends the run, as any other error at the same step."""
    assert failure_of(AttemptEnd(FAILED, [PREEMPTED], step=5)).fingerprint


@pytest.mark.parametrize(("count", "limit", "failed"), [(3, 3, True), (2, 3, False), (9, None, False)])
def test_the_limit_of_failed_saves(count: int, limit: int | None, failed: bool) -> None:
    assert storage_failed((count, "why"), limit) is failed
