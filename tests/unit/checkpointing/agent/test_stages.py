"""Several trainings in one process: which checkpoints are whose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentClient, AgentProcess, Refusal
from checkpointing.catalog import Catalog
from checkpointing.environment import SETTINGS_ENV, RankSettings
from checkpointing.rank import agent_connection
from checkpointing.rank.manager import CheckpointManager
from checkpointing.retention import Retention
from checkpointing.stages import FIRST_STAGE, STAGE_NAME, Stage, Stages
from checkpointing.storage import LocalStorage


def test_under_a_supervisor_each_location_is_a_stage_in_the_order_of_use() -> None:
    def lives(stages: Stages, ends: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
        found = []
        for location, step in ends:
            stage = stages.enter(location, supervised=True)
            found.append((stage.name, stage.number, stage.steps_before))
            stages.leave(location, step, finished=True)
        return found

    ends = [("runs/sft", 60), ("runs/dpo/", 40), ("/x/ reward model", 10)]
    expected = [("", 1, 0), ("stage-2-dpo", 2, 60), ("stage-3-reward-model", 3, 100)]
    # A script that is started again makes them in the same order.
    assert lives(Stages(), ends) == lives(Stages(), ends) == expected
    assert all(STAGE_NAME.fullmatch(name) for name, _, _ in expected[1:])


def test_the_same_location_is_another_stage_once_its_training_has_finished() -> None:
    stages = Stages()
    assert stages.enter("out", supervised=False) == FIRST_STAGE
    stages.leave("out", 30, finished=False)  # interrupted: a notebook's cell that is run again
    assert stages.enter("out", supervised=False) == FIRST_STAGE
    stages.leave("out", 60, finished=True)
    again = stages.enter("out", supervised=False)
    assert (again.name, again.inside("out"), again.inside("s3://b/p/")) == (
        "stage-2",
        "out/stage-2",
        "s3://b/p/stage-2",
    )
    # Without a supervisor another location is on its own.
    assert (
        stages.enter("other", supervised=False) == Stage("", 1, 0) or stages.enter("other", supervised=False).name == ""
    )


@pytest.mark.parametrize("name", ["stage-1", "stage-02", "../stage-2", "stage-2-a/b", "stage-2-", "checkpoint-2"])
def test_what_is_no_stage_is_not_taken_for_one(name: str) -> None:
    assert STAGE_NAME.fullmatch(name) is None


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess.start(str(tmp_path), "run")
    yield process
    process.close(10)


def rank(agent: AgentProcess, stage: Stage = FIRST_STAGE, attempt: int = 1) -> AgentClient:
    return AgentClient(agent.socket_path, attempt, 0, 0, 1, stage=stage)


def save(client: AgentClient, step: int, *, commit: bool = True) -> None:
    arena = client.acquire(step, 5, wait=True)
    assert not isinstance(arena, Refusal)
    number, buffer = arena
    buffer[:5] = b"state"
    client.staged(step, number, [("file", 0, 5)], 1, step * 4, Retention(2), commit=commit)
    if commit:
        assert client.wait(step) is None


def committed(folder: Path) -> list[int]:
    return Catalog(LocalStorage(folder)).committed_steps()


SECOND = Stage("stage-2-dpo", 2, 20)


def test_a_stage_has_checkpoints_and_snapshots_of_its_own(agent: AgentProcess, tmp_path: Path) -> None:
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    first = rank(agent)
    first.offer()
    for step in (10, 20):
        save(first, step)
    first.close()
    second = rank(agent, SECOND)
    assert second.offer()[0] == []
    save(second, 10)
    second.announce({"event": "log", "step": 12, "loss": 1.0})
    save(second, 15, commit=False)
    second.close()
    assert committed(tmp_path) == [10, 20]
    assert committed(tmp_path / "stage-2-dpo") == [10]
    # The attempt dies; the next one passes through the first stage again, and goes on in the second from memory.
    first = rank(agent, attempt=2)
    offered, _ = first.offer()
    assert 15 not in [snapshot.info.step for snapshot in offered]
    first.close()
    second = rank(agent, SECOND, attempt=2)
    assert [snapshot.info.step for snapshot in second.offer()[0]][-1:] == [15]
    second.close()
    protocol.send(monitor, {"do": "shutdown"})
    told = []
    while True:
        try:
            message, _ = protocol.receive(monitor)
        except OSError:
            break
        if message.get("event") in ("committed", "stage", "log"):
            told.append((message["event"], message.get("stage"), message.get("run_step", message.get("step"))))
    assert told[:2] == [("committed", None, 10), ("committed", None, 20)]
    # Counted over all stages, so that progress is seen.
    assert ("stage", "stage-2-dpo", None) in told and ("committed", "stage-2-dpo", 30) in told
    assert ("log", "stage-2-dpo", 32) in told
    assert LocalStorage(tmp_path).records("stage-") == {
        "stage-2-dpo.json": len(b'{"name": "stage-2-dpo", "number": 2, "steps_before": 20}')
    }


def test_what_is_kept_of_the_run_stays_at_its_location_in_later_stages(agent: AgentProcess, tmp_path: Path) -> None:
    """There another machine looks for the supervisor's note and the journal's copy."""
    (tmp_path / "journal").write_bytes(b"events")
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    second = rank(agent, SECOND)
    second.offer()
    protocol.send(monitor, {"do": "note", "text": "memory"})
    record = {"name": "events-1.jsonl", "path": str(tmp_path / "journal"), "start": 0, "end": 6}
    protocol.send(monitor, {"do": "record", **record})
    second.close()
    agent.close(10)
    assert LocalStorage(tmp_path).read_note() == b"memory"
    assert LocalStorage(tmp_path).records("events-") == {"events-1.jsonl": 6}
    assert LocalStorage(tmp_path / SECOND.name).records("events-") == {}


def test_only_the_runs_first_training_starts_from_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(location: str, steps: int) -> int:
        model = torch.nn.Linear(2, 2)
        own = CheckpointManager(location, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        start = own.resume()
        for step in range(start, steps):
            own.step(step + 1)
        own.close()
        return start

    monkeypatch.setattr(agent_connection, "STAGES", Stages())
    train(str(tmp_path / "before"), 3)
    monkeypatch.setattr(agent_connection, "STAGES", Stages())
    # What `runner start --resume-from` sets for its ranks.
    resume_from = str(tmp_path / "before" / "checkpoint-3")
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(location=str(tmp_path / "run"), resume_from=resume_from).to_json())
    assert train("sft", 5) == 3
    assert train("dpo", 4) == 0
