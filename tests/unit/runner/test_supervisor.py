"""What the first machine's runner answers to others, without a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.identity import JobIdentity
from runner.links import RankEvents
from runner.supervisor import Supervisor

OURS = JobIdentity({"job": "the configured job", "data.path": "a.parquet", "trainer.learning_rate": 1e-4})


def refusal(theirs: str) -> str | None:
    supervisor: Any = object.__new__(Supervisor)
    supervisor._identity = OURS
    answer: str | None = supervisor._refusal({"do": "hello", "node_rank": 1, "job": theirs})
    return answer


def test_another_node_must_do_the_same_job() -> None:
    """Another learning rate, or other data, on one node was not noticed."""
    assert refusal(OURS.to_json().decode()) is None
    other = JobIdentity({**OURS.what, "trainer.learning_rate": 2e-4})
    reason = refusal(other.to_json().decode())
    assert reason is not None and "(trainer.learning_rate: 0.0001 -> 0.0002)" in reason and "--allow-changes" in reason
    # It was told to differ, or is of another version.
    assert refusal("") is None is refusal("{}")


def test_a_follower_may_make_its_ends_again_in_the_same_folder(tmp_path: Path) -> None:
    """Its leader was replaced, so that another run begins: `Address already in use` ended it."""
    RankEvents(tmp_path).close()
    again = RankEvents(tmp_path)
    assert again.receive() == []
    again.close()
