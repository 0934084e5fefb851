"""The catalog of faults: what each does to a run, and when it does not apply."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.journals import entry
from helpers.small_checkpoint import network, write_checkpoint

from checkpointing.commit.catalog import Catalog
from checkpointing.commit.tiers import open_tiers
from checkpointing.errors import InvalidCheckpoint
from checkpointing.host import failpoints
from runner.chaos.faults import DAMAGES, FAULTS, NETWORK
from runner.chaos.scene import Effect, FailpointFile, NotApplicable, Scene


class Process:
    def __init__(self, pid: int, *, is_gone: bool = False) -> None:
        self.pid, self._is_gone = pid, is_gone
        self.signals: list[signal.Signals] = []

    def send_signal(self, number: signal.Signals) -> None:
        if self._is_gone:
            raise psutil.NoSuchProcess(self.pid)
        self.signals.append(number)

    def poll(self) -> int | None:
        return None if signal.SIGKILL not in self.signals else -9

    def wait(self, timeout_s: float) -> None:
        assert self.poll() is not None


class Run:
    """In place of `RunUnderTest`.

    Attributes:
        during: Called with each wait, which then looks once.
    """

    def __init__(self) -> None:
        self.process, self.helpers = Process(7), dict[str, Process]()
        self.ranks: dict[int, Process] = {}
        self.entries = [entry(1.0, "batch_shape", 1, micro_batch=4, accumulation=1)]
        self.waits: list[float] = []
        self.during: Callable[[], None] = lambda: None

    def rank(self, number: int) -> Process | None:
        return self.ranks.get(number)

    def helper(self, module: str) -> Process | None:
        return self.helpers.get(module)

    def all(self, kind: type, *, after: int | None = None) -> list[Any]:
        return [one.event for one in self.entries if isinstance(one.event, kind) and one.attempt > (after or 0)]

    def wait(self, find: Callable[[], Any], timeout_s: float) -> Any:
        self.waits.append(timeout_s)
        self.during()
        return find()

    def leftovers(self, settle_s: float) -> list[str]:
        return []

    def shared_memory(self) -> set[Path]:
        return set()

    def alive(self) -> list[Process]:
        return [*self.ranks.values()]


class Stage:
    """A scene with a run, and the way to a fault by its name."""

    def __init__(self, folder: Path) -> None:
        self.run = Run()
        self.folder, self.armed = folder / "checkpoints", folder / "failpoints"
        run: Any = self.run
        self.scene = Scene(run, open_tiers(str(self.folder)), random.Random(1), FailpointFile(self.armed))

    def inject(self, name: str) -> str:
        [fault] = [fault for fault in FAULTS if fault.name == name]
        return fault.inject(self.scene)

    def start_ranks(self, *gone: int) -> None:
        for rank in (0, 1):
            self.run.ranks[rank] = Process(100 + rank, is_gone=rank in gone)
            self.run.entries.append(entry(1.0, "rank_started", 1, rank=rank, local_rank=rank, pid=100 + rank))

    def fire(self, name: str) -> None:
        """As a process of the run does that reaches an armed failpoint."""
        (self.armed.with_suffix(".fired") / f"{name}.{self.scene.failpoints._version}").touch()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr("runner.chaos.faults.time.sleep", lambda seconds: None)
    return Stage(tmp_path)


def test_names_are_unique_and_failpoints_exist(stage: Stage) -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    at = {name.removeprefix("killed at ") for name in names if name.startswith("killed at ")}
    assert at <= set(failpoints.NAMES)
    stage.run.during = lambda: armed.append(stage.armed.read_text())
    armed: list[str] = []
    for name in ("disk full", "upload fails", "NaN in a batch", "out of memory"):
        with pytest.raises(NotApplicable, match="was not reached"):
            stage.inject(name)
    assert all(text.partition("=")[0] in failpoints.NAMES and failpoints._parse(text) for text in armed)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("rank killed", "no rank is running"),
        ("all ranks killed", "no rank is running"),
        ("rank stopped", "no rank is running"),
        ("launcher killed", "no runner.launcher.launcher is running"),
        ("agent killed", "no checkpointing.agent is running"),
        ("clock jumps by an hour", "no clock of its own"),
        ("memory pressure", "no memory cgroup"),
        ("no memory left", "no memory cgroup"),
        ("S3 is silent", "the S3 endpoint is not plain HTTP"),
        ("bit flipped", "fewer than two checkpoints"),
        ("killed at restore.read", "there is no checkpoint yet"),
    ],
)
def test_what_is_not_there_cannot_be_broken(name: str, what: str, stage: Stage) -> None:
    with pytest.raises(NotApplicable, match=what):
        stage.inject(name)
    assert stage.run.process.signals == []


def test_signals_reach_their_processes(stage: Stage) -> None:
    stage.start_ranks()
    stage.run.helpers["checkpointing.agent"] = agent = Process(50)
    stage.inject("agent killed")
    stage.inject("all ranks killed")
    assert agent.signals == [signal.SIGKILL]
    assert [rank.signals for rank in stage.run.ranks.values()] == [[signal.SIGKILL]] * 2
    stage.inject("rank stopped")
    assert sorted(len(rank.signals) for rank in stage.run.ranks.values()) == [1, 2]
    for name in ("preempted", "preempted twice", "supervisor killed"):
        stage.inject(name)
    assert stage.run.process.signals == [signal.SIGTERM] * 3 + [signal.SIGKILL]


def test_a_process_that_has_just_ended(stage: Stage) -> None:
    stage.start_ranks(0, 1)
    with pytest.raises(NotApplicable, match="has just ended"):
        stage.inject("rank killed")
    assert stage.inject("all ranks killed") == "SIGKILL to 2 ranks"


def test_a_short_grace_period_kills_all_at_once(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    semaphore = tmp_path / "sem"
    semaphore.touch()
    monkeypatch.setattr(stage.run, "shared_memory", lambda: {semaphore})
    stage.start_ranks(1)
    stage.inject("preempted, short grace")
    # Nobody acts on the death of another: all are stopped before any is killed.
    assert stage.run.ranks[0].signals == [signal.SIGSTOP, signal.SIGKILL] and not semaphore.exists()


def test_a_failpoint_that_fired_stays_recorded(stage: Stage) -> None:
    stage.run.during = lambda: stage.fire("training.loss")
    assert stage.inject("NaN in a batch").startswith("nan at training.loss, hit ")
    assert stage.scene.failpoints.has_fired("training.loss") and stage.armed.read_text()


def test_a_failpoint_that_was_not_reached_is_disarmed(stage: Stage) -> None:
    with pytest.raises(NotApplicable, match=r"training\.loss was not reached within 20 s"):
        stage.inject("NaN in a batch")
    assert stage.armed.read_text() == ""


def test_a_kill_in_the_next_attempt_begins_with_one_in_this(stage: Stage) -> None:
    write_checkpoint(stage.folder, 10, network())
    stage.start_ranks()
    what = stage.inject("killed at restore.read")
    assert what == "SIGKILL to a rank, and at restore.read in the next attempt"
    assert sum(len(rank.signals) for rank in stage.run.ranks.values()) == 1
    assert stage.armed.read_text() == "restore.read=kill"


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_micro_batch_that_cannot_be_halved(micro_batch: int, stage: Stage) -> None:
    for number, size in enumerate((4, micro_batch)):
        stage.run.entries.append(entry(1.0, "batch_shape", number + 1, micro_batch=size, accumulation=1))
    for name in ("out of memory", "no memory left"):
        with pytest.raises(NotApplicable, match=f"a micro-batch of {micro_batch} cannot be halved"):
            stage.inject(name)


def test_a_job_that_says_of_no_micro_batch_is_not_halved(stage: Stage) -> None:
    stage.run.entries.clear()
    for name in ("out of memory", "no memory left"):
        with pytest.raises(NotApplicable, match="has said of no micro-batch"):
            stage.inject(name)


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_whole(name: str, stage: Stage) -> None:
    for step in (10, 20):
        storage = write_checkpoint(stage.folder, step, network())
    what = stage.inject(name)
    assert stage.scene.damaged == {20} and what.startswith("all killed; checkpoint-20: ")
    assert stage.run.process.signals == [signal.SIGKILL]
    assert Catalog(storage).verify(10).step == 10
    with pytest.raises(InvalidCheckpoint):
        Catalog(storage).verify(20)


class Clock:
    def __init__(self) -> None:
        self.set_to: list[float] = []

    def set(self, seconds: float) -> None:
        self.set_to.append(seconds)


def test_the_clock_is_put_back(stage: Stage) -> None:
    clock: Any = Clock()
    stage.scene.clock = clock
    stage.inject("clock jumps by an hour")
    assert abs(clock.set_to[0]) == 3600 and clock.set_to[1:] == [0]


class Memory:
    """A cgroup in which nobody needs more memory, unless a limit of 0 kills."""

    def __init__(self, *, kills: bool) -> None:
        self.num_kills, self._kills = 3, kills
        self.limits: list[int] = []

    @contextlib.contextmanager
    def limited(self, spare_bytes: int) -> Iterator[None]:
        self.limits.append(spare_bytes)
        self.num_kills += 2 * (self._kills and spare_bytes == 0)
        yield


def test_memory_that_runs_out(stage: Stage) -> None:
    idle: Any = Memory(kills=False)
    stage.scene.memory = idle
    with pytest.raises(NotApplicable, match="no process needed more memory"):
        stage.inject("no memory left")
    full: Any = Memory(kills=True)
    stage.scene.memory = full
    assert stage.inject("no memory left") == "the kernel killed 2 processes"
    stage.inject("memory pressure")
    assert full.limits == [0, 64 << 20]


class Proxy:
    def __init__(self) -> None:
        self.num_disturbed, self.calls = 4, list[tuple[str, float]]()

    def disturb(self, how: str, seconds: float) -> None:
        self.calls.append((how, seconds))
        self.num_disturbed += 3


@pytest.mark.parametrize(("name", "how"), zip(NETWORK, ["busy", "silent", "broken"], strict=True))
def test_the_path_to_s3_is_disturbed_for_a_while(name: str, how: str, stage: Stage) -> None:
    proxy: Any = Proxy()
    stage.scene.proxy = proxy
    what = stage.inject(name)
    [(called, seconds)] = proxy.calls
    assert called == how and stage.run.waits == [seconds] and what.startswith("3 requests affected")


def test_faults_that_damage_end_the_run_and_others_at_a_save_end_nothing() -> None:
    effects = {fault.name: fault.effect for fault in FAULTS}
    assert {effects[name] for name in DAMAGES} == {Effect.RUN}
    assert {effects[name] for name in (*NETWORK, "disk full", "I/O error")} == {Effect.NOTHING}
