"""What the first machine's runner answers to others, without a launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.parametrize(("nproc", "ready"), [(2, {1}), (3, set())])
def test_another_node_must_have_as_many_ranks(nproc: int, ready: set[int]) -> None:
    sent: list[Any] = []
    supervisor: Any = object.__new__(Supervisor)
    supervisor._leader = SimpleNamespace(send=lambda message, number: sent.append((number, message["reason"])))
    supervisor._local_ranks, supervisor._ready = 2, set()
    supervisor._on_peer(1, {"do": "ready", "nproc": nproc})
    assert supervisor._ready == ready
    wanted = "this node has 3 ranks, the first one 2; give the same --nproc-per-node everywhere"
    assert sent == ([] if ready else [(1, wanted)])
