"""A bit of a snapshot flips in memory: only what was captured is committed, and nothing is pruned for anything else."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from unit.checkpointing.agent.doubles import Bench, Store

from checkpointing.agent.arenas import Arena
from checkpointing.agent.events import CommitFailedEvent, Committed, SnapshotDamaged, SnapshotDropped
from checkpointing.agent.scheduler import SnapshotContent
from checkpointing.commit.catalog import verify
from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.digest import added, digest_buffer, word_sum
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.storage.object_storage import ObjectStorage

# When the bit flips: as it is copied, when it has been digested, at a write, or later.
MOMENTS = ["copied", "digested", "written", "never"]


class FlippingStore(Store):
    """Calls something before it stores the n-th object."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], None] = lambda: None
        self.at = -1

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        self.at -= 1
        if self.at == 0:
            self.before()
        return super().put(key, data, if_absent=if_absent)


class Flipped:
    """A run that keeps one checkpoint, and a bit that flips while the next one is committed."""

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)
        self.store = FlippingStore()
        self.bench = Bench(Tiers(ObjectStorage(self.store)))
        self.bench.workers.current.set_retention(Retention(1))
        self.captured: dict[int, dict[str, bytes]] = {}
        self.commit(10, "never")
        self.moment = self.draw.choice(MOMENTS)
        self.commit(15, self.moment)

    def commit(self, step: int, moment: str) -> None:
        bench, draw = self.bench, self.draw
        names = ["model.safetensors", "optimizer.pt", "trainer_state.json"]
        data = {name: draw.randbytes(draw.randint(1, 3000)) for name in names}
        self.captured[step] = data
        arena = bench.acquire(step, nbytes=3 * 4096)
        assert isinstance(arena, Arena)
        files = [(name, number * 4096, len(data[name])) for number, name in enumerate(names)]
        for name, offset, size in files:
            arena.view(offset, size)[:] = data[name]
        sums = [(word_sum(data[name], offset), size) for name, offset, size in files]
        others = (added([one for one, _ in sums[1:]]), sum(size for _, size in sums[1:]))
        info = SnapshotInfo("run", 1, step, 2, step)

        def flip() -> None:
            _, offset, size = draw.choice(files)
            arena.view(offset, size)[draw.randrange(size)] ^= 1 << draw.randrange(8)

        if moment == "copied":
            flip()
        elif moment == "digested":
            digest = arena.digest

            def digest_and_flip() -> str | None:
                found = digest()
                flip()
                return found

            arena.digest = digest_and_flip  # type: ignore[method-assign]
        elif moment == "written":
            self.store.before, self.store.at = flip, draw.randint(1, 4)
        bench.scheduler.copied(arena.number, step, 0, 2, SnapshotContent(info, files, True), words=sums[0])
        bench.scheduler.copied(arena.number, step, 1, 2, None, words=others)
        self.results = bench.settle()

    @property
    def committed(self) -> list[int]:
        return self.bench.tiers.catalog.committed_steps()

    def check(self) -> None:
        """What is committed is what was captured, and something always is."""
        assert self.committed
        for step in self.committed:
            manifest = verify(self.bench.tiers.durable, step)
            assert {file.name: file.digest for file in manifest.files} == {
                name: digest_buffer(data) for name, data in self.captured[step].items()
            }
        if 15 not in self.committed:
            assert self.committed == [10], "the good one was pruned"
        for arena in self.bench.pool.arenas:
            arena.memory.close()


def test_a_flipped_bit_is_never_committed() -> None:
    """`BIT_FLIPS=1000` of them, and more."""
    outcomes = dict.fromkeys(MOMENTS, 0)
    for number in range(int(os.environ.get("BIT_FLIPS", "200"))):
        one = Flipped(number)
        one.check()
        is_committed = 15 in one.committed
        outcomes[one.moment] += is_committed
        if one.moment in ("copied", "digested"):
            assert not is_committed
            # Only what changes later says that the memory is bad: a script may have changed the state.
            kind = SnapshotDropped if one.moment == "copied" else SnapshotDamaged
            assert any(isinstance(result, kind) for result in one.results)
            assert any(isinstance(result, CommitFailedEvent) for result in one.results)
        elif one.moment == "never":
            assert any(isinstance(result, Committed) for result in one.results)
    assert outcomes["never"] > 0


@pytest.mark.parametrize("is_off", ["digest", "changed_bytes"])
def test_without_either_comparison_it_is(is_off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_off == "digest":
        monkeypatch.setattr("checkpointing.agent.arenas.added", lambda _: 0)
    else:
        monkeypatch.setattr(Arena, "changed_bytes", lambda arena, name: None)
    with pytest.raises((AssertionError, InvalidCheckpoint)):
        for number in range(200):
            Flipped(number).check()


def test_where_it_has_changed_is_said() -> None:
    bench = Bench()
    arena = bench.snapshot(5)
    bench.work()
    arena.view(0, 5)[1] ^= 4
    problem = arena.changed_bytes("file")
    assert problem is not None and "in bytes 0 to 5" in problem and "offset 0x0" in problem
