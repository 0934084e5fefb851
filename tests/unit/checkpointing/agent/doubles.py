"""The agent's parts without processes and threads: what other threads would do is done when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chaos.stores import MemoryObjects

from checkpointing.agent.arenas import Arena, ArenaPool
from checkpointing.agent.events import Event
from checkpointing.agent.protocol import Refusal
from checkpointing.agent.reporting import Report, Result
from checkpointing.agent.resumption import Resumption
from checkpointing.agent.scheduler import ArenaRequest, Scheduler, SnapshotContent
from checkpointing.agent.writer import Writer
from checkpointing.agent.writers import Writers
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers
from checkpointing.format.digest import digest_buffer
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.storage import Storage, open_storage
from checkpointing.storage.object_storage import ObjectStorage

STATE = b"state"


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Reports(list[tuple[Result, Arena | None]]):
    """What was reported, in order."""

    def __call__(self, result: Result, arena: Arena | None) -> None:
        self.append((result, arena))

    @property
    def results(self) -> list[Result]:
        return [result for result, _ in self]


class UnthreadedWorker(Writer):
    """Handles its tasks in `run_pending`."""

    def __init__(self, tiers: Tiers, report: Report, commits: bool = True) -> None:
        self._waiting: list[Callable[[], None]] = []
        super().__init__(
            tiers,
            report,
            commits=commits,
            local_retention=Retention(2),
            spawn=lambda call, name: self._waiting.append(call),
        )

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.run_pending()

    def run_pending(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()
        super().run_pending()


class Store(MemoryObjects):
    """An object store that can be made to refuse everything."""

    refuses: str | None = None

    def _check(self) -> None:
        if self.refuses is not None:
            raise OSError(5, self.refuses)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        self._check()
        return super().put(key, data, if_absent=if_absent)

    def get(self, key: str) -> bytes | None:
        self._check()
        return super().get(key)

    def sizes(self, folder: str = "") -> dict[str, int]:
        self._check()
        return super().sizes(folder)


class Bench:
    """Scheduler and resumption over a store in memory."""

    def __init__(self, tiers: Tiers | None = None, *, commits: bool = True, memory_limit: int | None = None) -> None:
        self.store = Store()
        self.tiers = tiers if tiers is not None else Tiers(ObjectStorage(self.store))
        self.events: list[Event] = []
        self._results = Reports()
        self.workers = Writers(self.tiers, self._results, UnthreadedWorker, commits=commits)
        self.pool = ArenaPool(memory_limit, lambda num_arenas, reason: None)
        self.scheduler = Scheduler(self.pool, self.workers, self.events.append)
        self.resumption = Resumption(self.pool, self.scheduler, self.workers, self.events.append)
        self._number = 0

    def acquire(
        self, step: int, *, wait: bool = False, nbytes: int = len(STATE), urgent: bool = False
    ) -> Arena | Refusal | None:
        """As the node's leader does it."""
        self._number += 1
        return self.scheduler.acquire(ArenaRequest(step, self._number, nbytes, wait, urgent), is_leader=True)

    def got(self, step: int) -> Arena:
        arena = self.acquire(step)
        assert isinstance(arena, Arena)
        return arena

    def copied(self, arena: Arena, *, attempt: int = 1, commit: bool = False, num_ranks: int = 1) -> None:
        """The leader has copied its share."""
        arena.view(0, len(STATE))[:] = STATE
        info = SnapshotInfo("run", attempt, arena.step, num_ranks, arena.step)
        content = SnapshotContent(info, [("file", 0, len(STATE))], commit)
        self.scheduler.copied(arena.number, arena.step, 0, num_ranks, content)

    def snapshot(self, step: int, *, commit: bool = False) -> Arena:
        arena = self.got(step)
        self.copied(arena, commit=commit)
        return arena

    def work(self) -> None:
        """The threads do what they have been given; nobody has taken the results yet."""
        self.workers.current.run_pending()

    def settle(self) -> list[Result]:
        """The threads do all there is to do, and the results are taken."""
        taken: list[Result] = []
        while True:
            self.work()
            if not self._results:
                return taken
            waiting, self._results[:] = list(self._results), []
            for result, arena in waiting:
                taken.append(result)
                if arena is not None:
                    self.scheduler.take_result(result, arena)


def save(storage: Storage, step: int, attempt: int = 1, data: bytes = STATE, **metrics: float) -> None:
    """Commit a checkpoint of one file."""
    files = [StagedFile("file", [memoryview(data)], lambda: digest_buffer(data))]
    commit_snapshot(storage, SnapshotInfo("run", attempt, step, 1, step, metrics), files)


def two_tiers(folder: Path) -> tuple[Tiers, Store]:
    """A local directory in front of a store in memory."""
    store = Store()
    return Tiers(ObjectStorage(store), open_storage(str(folder / "local"))), store
