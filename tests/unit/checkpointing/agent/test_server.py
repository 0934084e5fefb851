"""The agent as a real process, through its socket."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from infra.parts import lacks

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentClient, AgentProcess
from checkpointing.agent.options import EXIT_DELAYED, AgentOptions
from checkpointing.agent.protocol import Refusal
from checkpointing.commit.catalog import Catalog
from checkpointing.commit.reading import read_shared
from checkpointing.commit.retention import Retention
from checkpointing.errors import AgentDelayed, AgentUnavailable
from checkpointing.format.digest import digest_buffer
from checkpointing.storage import LocalStorage


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess.start(AgentOptions(location=str(tmp_path / "checkpoints"), run_id="run"))
    yield process
    process.close(10)


def rank(agent: AgentProcess, local_rank: int = 0, world: int = 1, attempt: int = 1) -> AgentClient:
    return AgentClient(agent.socket_path, attempt, local_rank, local_rank, world)


def stage(client: AgentClient, step: int, data: bytes = b"state", wait: bool = False, commit: bool = True) -> bool:
    arena = client.acquire(step, len(data), wait=wait)
    if isinstance(arena, Refusal):
        return False
    number, buffer = arena
    buffer[: len(data)] = data
    client.staged(step, number, [("file", 0, len(data))], 1, step * 4, Retention(2), commit=commit)
    return True


def got(acquired: tuple[int, memoryview] | Refusal) -> tuple[int, memoryview]:
    assert not isinstance(acquired, Refusal)
    return acquired


def committed(tmp_path: Path) -> list[int]:
    return Catalog(LocalStorage(tmp_path / "checkpoints")).committed_steps()


def wait_until_idle(pid: int) -> None:
    """Return when a process has not been scheduled for a while: all its threads wait."""
    process = psutil.Process(pid)
    while True:
        before = process.num_ctx_switches()
        time.sleep(0.3)
        if process.num_ctx_switches() == before:
            return


def test_a_stop_signal_that_another_thread_receives_ends_it(agent: AgentProcess) -> None:
    """Then, as in the moment before the main thread waits, no wait is interrupted: a training never ended."""
    pid = agent.process.pid
    client = rank(agent)
    wait_until_idle(pid)
    other = next(number for task in Path(f"/proc/{pid}/task").iterdir() if (number := int(task.name)) != pid)
    assert ctypes.CDLL(None).tgkill(pid, other, signal.SIGTERM) == 0
    assert agent.process.wait(30) == 0
    client.close()


def test_commit_verify_and_retention(agent: AgentProcess, tmp_path: Path) -> None:
    client = rank(agent)
    for step in (1, 2, 3):
        assert stage(client, step, b"x" * step, wait=True)
        assert client.wait(step) is None
    client.close()
    agent.close(120)
    assert committed(tmp_path) == [2, 3]
    manifest = Catalog(LocalStorage(tmp_path / "checkpoints")).verify(3)
    assert (manifest.samples_consumed, manifest.attempt, manifest.total_bytes) == (12, 1, 3)


def test_a_snapshot_is_committed_only_when_every_rank_has_copied(agent: AgentProcess, tmp_path: Path) -> None:
    first, second = rank(agent, 0, 2), rank(agent, 1, 2)
    assert stage(first, 1)
    number, _ = got(second.acquire(1, 0, wait=False))
    time.sleep(0.2)
    assert committed(tmp_path) == []
    second.staged(1, number, [], 2, 0, Retention())
    assert first.wait(1) is None
    assert committed(tmp_path) == [1]


def test_a_snapshot_that_a_dead_rank_left_unfinished_is_dropped(agent: AgentProcess, tmp_path: Path) -> None:
    first, second = rank(agent, 0, 2), rank(agent, 1, 2)
    assert stage(first, 1)
    first.close()
    second.close()
    again = rank(agent, attempt=2)
    assert stage(again, 1, b"whole")
    assert again.wait(1) is None
    assert Catalog(LocalStorage(tmp_path / "checkpoints")).verify(1).attempt == 2


def test_a_whole_snapshot_outlives_its_rank_and_its_monitor(agent: AgentProcess, tmp_path: Path) -> None:
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    protocol.receive(monitor)
    client = rank(agent)
    assert stage(client, 1, bytes(50_000_000))
    client.close()
    monitor.close()
    assert agent.process.wait(120) == 0
    assert committed(tmp_path) == [1]


def test_an_older_attempt_is_refused(agent: AgentProcess) -> None:
    old = rank(agent, attempt=1)
    rank(agent, attempt=2)
    with pytest.raises(AgentUnavailable, match="attempt is over"):
        old.acquire(1, 10, wait=False)
    with pytest.raises(AgentUnavailable, match="attempt 1 is over; 2 runs now"):
        rank(agent, attempt=1)


def test_busy_arenas_skip_a_snapshot_instead_of_waiting(agent: AgentProcess) -> None:
    client = rank(agent, 0, 2)  # The peer never copies, so the arenas stay busy.
    rank(agent, 1, 2)
    assert stage(client, 1) and stage(client, 2)
    assert not stage(client, 3)


def test_the_same_step_is_never_overwritten(agent: AgentProcess, tmp_path: Path) -> None:
    client = rank(agent)
    assert stage(client, 1, b"first") and client.wait(1) is None
    second = rank(agent, attempt=2)
    assert stage(second, 1, b"other")
    assert "exists already" in (second.wait(1) or "")
    assert (tmp_path / "checkpoints" / "checkpoint-1" / "file").read_bytes() == b"first"


def test_a_full_disk_fails_the_save_and_the_next_one_works(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=4M tmpfs {mount} 2>/dev/null") != 0:
        lacks("tmpfs", "mount failed")
    try:
        agent = AgentProcess.start(AgentOptions(location=str(mount / "checkpoints"), run_id="run"))
        client = rank(agent)
        assert stage(client, 1, b"small", wait=True) and client.wait(1) is None
        assert stage(client, 2, bytes(8_000_000), wait=True)
        assert "No space left" in (client.wait(2) or "")
        assert sorted(p.name for p in (mount / "checkpoints").iterdir()) == [
            ".agent.lock",
            ".fence.json",
            "checkpoint-1",
        ]
        assert stage(client, 3, b"small again", wait=True) and client.wait(3) is None
        agent.close(10)
    finally:
        os.system(f"umount {mount}")


def test_a_second_agent_waits_for_the_first(agent: AgentProcess, tmp_path: Path) -> None:
    os.kill(agent.process.pid, signal.SIGSTOP)
    os.kill(agent.process.pid, signal.SIGKILL)
    second = AgentProcess.start(AgentOptions(location=str(tmp_path / "checkpoints"), run_id="run"))
    second.close(10)


def test_an_unusable_location_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AgentUnavailable, match=r"did not start.*file"):
        AgentProcess.start(AgentOptions(location=str(tmp_path / "file" / "checkpoints"), run_id="run"))
    with pytest.raises(AgentUnavailable, match="scheme 'nosuch' is not known"):
        AgentProcess.start(AgentOptions(location="nosuch://host/x", run_id="run"))


@pytest.mark.parametrize(("status", "error"), [(EXIT_DELAYED, AgentDelayed), (1, AgentUnavailable)])
def test_an_agent_that_may_start_later_is_told_from_one_that_never_will(
    status: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent"
    lines = ["#!/bin/bash", 'while [ "$1" != --ready-fd ]; do shift; done', 'echo "error busy" >&$2', f"exit {status}"]
    agent.write_text("\n".join(lines))
    agent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(agent))
    with pytest.raises(AgentUnavailable, match="did not start: busy") as caught:
        AgentProcess.start(AgentOptions(location=str(tmp_path), run_id="run"))
    assert type(caught.value) is error


def test_a_limit_of_processes_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("checkpointing.agent.client.subprocess.Popen", refused)
    with pytest.raises(AgentDelayed, match="temporarily unavailable"):
        AgentProcess.start(AgentOptions(location=str(tmp_path), run_id="run"), directory=tmp_path / "agent")


def test_a_growing_log_history_does_not_make_new_arenas(agent: AgentProcess) -> None:
    client = rank(agent)
    for step in range(1, 30):
        number, _ = got(client.acquire(step, 1_000_000 + step * 20_000, wait=True))
        assert number in (0, 1)
        client.staged(step, number, [("file", 0, 1_000_000)], 1, step, Retention(1))
        assert client.wait(step) is None


def test_a_larger_state_gets_a_larger_arena_and_the_old_one_is_unmapped(agent: AgentProcess) -> None:
    client = rank(agent)
    for step, nbytes in enumerate((1_000, 20_000_000, 60_000_000, 60_000_000), start=1):
        assert stage(client, step, bytes(nbytes), wait=True)
        assert client.wait(step) is None
    assert len(client._arenas) <= 2


def test_a_snapshot_in_memory_is_offered_to_the_next_attempt_and_committed_for_the_dead_one(
    agent: AgentProcess, tmp_path: Path
) -> None:
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    protocol.receive(monitor)
    first = rank(agent)
    assert stage(first, 10, b"on disk") and first.wait(10) is None
    assert stage(first, 15, b"memory only", commit=False)
    first.close()
    protocol.send(monitor, {"do": "end_attempt"})
    second = rank(agent, attempt=2)
    offered = {snapshot.info.step: snapshot for snapshot in second.offer().snapshots}
    assert sorted(offered) == [10, 15]
    newest = offered[15]
    assert bytes(newest.files["file"]) == b"memory only"
    assert newest.digests["file"] == digest_buffer(b"memory only")
    assert (newest.info.attempt, newest.info.samples_consumed) == (1, 60)
    events: list[protocol.Message] = []
    while "committed" not in [event.get("event") for event in events if event.get("step") == 15]:
        events.append(protocol.receive(monitor)[0])
    assert Catalog(LocalStorage(tmp_path / "checkpoints")).verify(15).attempt == 1


def test_the_newest_whole_snapshot_is_never_overwritten_while_the_next_is_made(agent: AgentProcess) -> None:
    client, peer = rank(agent, 0, 2), rank(agent, 1, 2)

    def both(step: int) -> None:
        assert stage(client, step, commit=False)
        number, _ = got(peer.acquire(step, 0, wait=False))
        peer.staged(step, number, [], 2, 0, Retention())

    for step in range(1, 8):
        both(step)
        assert max(snapshot.info.step for snapshot in peer.offer().snapshots) == step
    assert stage(client, 8, commit=False)  # The peer dies in mid-copy.
    assert [snapshot.info.step for snapshot in peer.offer().snapshots] == [7]


def test_a_damaged_snapshot_is_neither_offered_nor_published(agent: AgentProcess, tmp_path: Path) -> None:
    client = rank(agent)
    assert stage(client, 1, commit=False)
    client.discard(1, "it differs")
    assert client.offer().snapshots == []
    client.close()
    agent.close(10)
    assert committed(tmp_path) == []


@pytest.mark.parametrize(("limit", "arenas"), [(30_000_000, 2), (20_000_000, 1), (1_000_000, 0)])
def test_the_memory_limit_is_kept_and_its_effect_is_told(limit: int, arenas: int, tmp_path: Path) -> None:
    agent = AgentProcess.start(AgentOptions(location=str(tmp_path / "checkpoints"), run_id="run", memory_limit=limit))
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    protocol.receive(monitor)
    client = rank(agent)
    acquired = client.acquire(1, 8_000_000, wait=True)
    if arenas == 0:
        assert acquired is Refusal.NO_MEMORY
    else:
        number, _ = got(acquired)
        client.staged(1, number, [("file", 0, 8_000_000)], 1, 1, Retention())
        assert client.wait(1) is None
    if arenas < 2:
        event, _ = protocol.receive(monitor)
        assert (event["event"], event["arenas"]) == ("memory_short", arenas)
        assert "checkpoint.memory_limit" in event["reason"]
    status = Path(f"/proc/{agent.process.pid}/smaps").read_text()
    assert status.count("memfd:checkpoint-arena") == arenas
    monitor.close()
    agent.close(10)


def test_a_signal_to_every_process_of_the_job_leaves_the_ending_to_the_monitor(
    agent: AgentProcess, tmp_path: Path
) -> None:
    """Slurm signals all processes of a job step; the ranks make their last snapshot only after that."""
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    protocol.receive(monitor)
    client = rank(agent)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        agent.process.send_signal(number)
        # The agent answers, so it has survived the signal.
        assert stage(client, 10 + number, wait=True) and client.wait(10 + number) is None
    client.close()
    monitor.close()
    assert agent.process.wait(120) == 0
    assert committed(tmp_path)[-1] == 10 + signal.SIGTERM


def test_what_is_offered_is_mapped_at_once(agent: AgentProcess) -> None:
    """Not page by page, while it is read."""
    nbytes = 64 << 20
    assert stage(rank(agent), 1, bytes(nbytes), commit=False)
    snapshots = rank(agent, attempt=2).offer().snapshots
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read_shared(snapshots[0].files["file"])
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # The interpreter has some of its own.
    assert num_faults < nbytes // resource.getpagesize() // 10


def agent_that_fails(tmp_path: Path, failpoints: str, monkeypatch: pytest.MonkeyPatch) -> AgentProcess:
    monkeypatch.setenv("CHECKPOINT_FAILPOINTS", failpoints)
    process = AgentProcess.start(AgentOptions(location=str(tmp_path / "checkpoints"), run_id="run"))
    monkeypatch.delenv("CHECKPOINT_FAILPOINTS")
    return process


def test_a_commit_that_failed_is_tried_again_when_its_ranks_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt may resume from that snapshot with no step left to train, and then would not commit it."""
    agent = agent_that_fails(tmp_path, "local.synced=error", monkeypatch)
    monitor = protocol.connect(agent.socket_path)
    protocol.send(monitor, {"do": "hello", "role": "monitor"})
    client = rank(agent)
    assert stage(client, 7)
    assert "Input/output error" in str(client.wait(7))
    client.close()
    protocol.send(monitor, {"do": "end_attempt"})
    while protocol.receive(monitor)[0].get("event") != "attempt_over":
        pass
    protocol.send(monitor, {"do": "shutdown"})
    assert agent.process.wait(120) == 0
    assert committed(tmp_path) == [7]
    monitor.close()
    agent.close()


def test_an_agent_that_could_not_write_the_last_snapshot_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = "; ".join(f"{name}=full" for name in ("local.synced", "local.write", "local.written"))
    agent = agent_that_fails(tmp_path, points, monkeypatch)
    client = rank(agent)
    assert stage(client, 7)
    assert "No space left" in str(client.wait(7))
    client.close()
    agent.process.terminate()
    assert agent.process.wait(120) == 1
    assert committed(tmp_path) == []
    agent.close()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_last_checkpoint_that_only_the_local_tier_holds_is_not_the_end(comes_back: bool, tmp_path: Path) -> None:
    """The run would end with 0, and its last steps be gone with the machine's disk."""
    durable, local, away = tmp_path / "durable", tmp_path / "local", tmp_path / "away"
    agent = AgentProcess.start(AgentOptions(location=str(durable), local_tier=str(local), run_id="run"))
    client = rank(agent)
    assert stage(client, 1) and client.wait(1) is None
    durable.rename(away)
    durable.write_text("not a folder")
    assert stage(client, 7, wait=True) and client.wait(7) is None
    client.close()
    if comes_back:
        durable.unlink()
        away.rename(durable)
    agent.process.terminate()
    assert agent.process.wait(120) == (0 if comes_back else 1)
    assert Catalog(LocalStorage(local)).committed_steps()[-1] == 7
    agent.close()


def test_a_commit_that_seemed_to_fail_is_found_done_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_that_fails(tmp_path, "local.renamed=error", monkeypatch)
    client = rank(agent)
    assert stage(client, 7)
    assert "Input/output error" in str(client.wait(7))
    client.close()
    agent.process.terminate()
    assert agent.process.wait(120) == 0
    assert committed(tmp_path) == [7]
    agent.close()
