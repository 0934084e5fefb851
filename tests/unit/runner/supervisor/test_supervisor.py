"""What the first machine's runner answers to others, without a launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.storage import LocalStorage
from runner.errors import ExitCode, PeersMissing
from runner.node.rank_watch import RankEvents
from runner.recovery.policy import Stop
from runner.recovery.restart_state import FINISHED_PATIENCE_S, RunRecord
from runner.supervisor.follower import Follower
from runner.supervisor.identity import JobIdentity, key_of
from runner.supervisor.supervisor import Supervisor

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


def test_every_node_hears_its_own_end() -> None:
    sent: dict[int, Any] = {}
    supervisor: Any = object.__new__(Supervisor)
    supervisor._bad_nodes = {2}
    supervisor._leader = SimpleNamespace(
        present={1, 2, 3}, send=lambda message, number: sent.update({number: message}), close=lambda: None
    )
    supervisor._dismiss_others(Stop(ExitCode.BAD_NODE, "this node is at fault: uncorrectable ECC error"))
    assert {number: message["exit_code"] for number, message in sent.items()} == {1: 75, 2: 80, 3: 75}
    assert sent[1]["reason"].startswith("node 2 is at fault") and sent[1]["reason"].endswith("ECC error")
    assert supervisor._leader is None


LONGER = JobIdentity({**OURS.what, "trainer.max_steps": 200})


@pytest.mark.parametrize(("finished", "is_done"), [(OURS, True), (LONGER, False), (None, False)])
def test_a_finished_run_waits_for_nobody_for_long(finished: JobIdentity | None, is_done: bool) -> None:
    """Unless it is to go further: then the other nodes are needed."""
    supervisor: Any = object.__new__(Supervisor)
    supervisor._identity = OURS
    supervisor._memory = RunRecord(finished=key_of(finished) if finished is not None else "")
    supervisor._life = SimpleNamespace(stop=None)
    supervisor._node = SimpleNamespace(ensure_processes=lambda: None)

    def gather() -> None:
        raise PeersMissing("machine 1 of 2 has not come")

    supervisor._gather = gather
    if is_done:
        decision = supervisor._attempt_and_decide()
        assert isinstance(decision, Stop) and decision.exit_code is ExitCode.DONE
    else:
        with pytest.raises(PeersMissing):
            supervisor._attempt_and_decide()


@pytest.mark.parametrize(("finished", "is_done"), [(OURS, True), (LONGER, False)])
def test_a_follower_that_finds_nobody_looks_at_the_record(finished: JobIdentity, is_done: bool, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.replace_note(RunRecord(finished=key_of(finished)).to_json(3).encode())
    follower: Any = object.__new__(Follower)
    follower._job_key, follower._heard_at, follower._asked_at = key_of(OURS), 0.0, 0.0
    follower._config = SimpleNamespace(tiers=SimpleNamespace(durable=storage))
    assert not follower._has_finished(FINISHED_PATIENCE_S - 1)
    assert follower._has_finished(FINISHED_PATIENCE_S + 1) is is_done
    # It is not asked at each turn.
    assert not follower._has_finished(FINISHED_PATIENCE_S + 2)


def test_the_key_of_a_job_is_that_of_equal_jobs_alone() -> None:
    again = JobIdentity(dict(reversed(list(OURS.what.items()))))
    assert key_of(OURS) == key_of(again) != key_of(LONGER)
