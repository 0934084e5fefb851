"""Several trainings in one process: which checkpoints are whose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentClient, AgentProcess
from checkpointing.agent.events import Log
from checkpointing.agent.options import AgentOptions
from checkpointing.agent.protocol import Refusal
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import FIRST_STAGE, TrainingStage, TrainingStages
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.manager import node_services
from checkpointing.manager.manager import CheckpointManager
from checkpointing.storage import LocalStorage


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess.start(AgentOptions(location=str(tmp_path), run_id="run"))
    yield process
    process.close(10)


def rank(agent: AgentProcess, stage: TrainingStage = FIRST_STAGE, attempt: int = 1) -> AgentClient:
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


SECOND = TrainingStage("stage-2-dpo", 2, 20)


def test_a_stage_has_checkpoints_and_snapshots_of_its_own(agent: AgentProcess, tmp_path: Path) -> None:
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    first = rank(agent)
    first.offer()
    for step in (10, 20):
        save(first, step)
    first.close()
    second = rank(agent, SECOND)
    assert second.offer().snapshots == []
    save(second, 10)
    second.announce(Log(step=12, loss=1.0))
    save(second, 15, commit=False)
    second.close()
    assert committed(tmp_path) == [10, 20]
    assert committed(tmp_path / "stage-2-dpo") == [10]
    # The attempt dies; the next one passes through the first stage again, and goes on in the second from memory.
    first = rank(agent, attempt=2)
    offered = first.offer().snapshots
    assert 15 not in [snapshot.info.step for snapshot in offered]
    first.close()
    second = rank(agent, SECOND, attempt=2)
    assert [snapshot.info.step for snapshot in second.offer().snapshots][-1:] == [15]
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
    assert LocalStorage(tmp_path).sidecars.sizes("stage-") == {
        "stage-2-dpo.json": len(b'{"name": "stage-2-dpo", "number": 2, "steps_before": 20}')
    }


def test_what_is_kept_of_the_run_stays_at_its_location_in_later_stages(agent: AgentProcess, tmp_path: Path) -> None:
    """There another machine looks for the supervisor's note and the journal's copy."""
    (tmp_path / "journal").write_bytes(b"events")
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    second = rank(agent, SECOND)
    second.offer()
    protocol.send(monitor, {"do": "restart_state", "text": "memory"})
    sidecar = {"name": "events-1.jsonl", "path": str(tmp_path / "journal"), "start": 0, "end": 6}
    protocol.send(monitor, {"do": "sidecar", **sidecar})
    second.close()
    protocol.send(monitor, {"do": "shutdown"})
    assert agent.process.wait(60) == 0
    monitor.close()
    assert LocalStorage(tmp_path).sidecars.read_restart_state() == b"memory"
    assert LocalStorage(tmp_path).sidecars.sizes("events-") == {"events-1.jsonl": 6}
    assert LocalStorage(tmp_path / SECOND.name).sidecars.sizes("events-") == {}


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

    monkeypatch.setattr(node_services, "STAGES", TrainingStages())
    train(str(tmp_path / "before"), 3)
    monkeypatch.setattr(node_services, "STAGES", TrainingStages())
    # What `runner start --resume-from` sets for its ranks.
    resume_from = str(tmp_path / "before" / "checkpoint-3")
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(location=str(tmp_path / "run"), resume_from=resume_from).to_json())
    assert train("sft", 5) == 3
    assert train("dpo", 4) == 0
