"""How many arenas there are, and which may be filled again."""

from __future__ import annotations

import pytest

from checkpointing.agent.arenas import Arena, ArenaPool, ArenaState
from checkpointing.host.shared_memory import SharedMemory

MB = 1_000_000


def pool(limit: int | None = None) -> tuple[ArenaPool, list[tuple[int, str]]]:
    told: list[tuple[int, str]] = []
    return ArenaPool(limit, lambda num_arenas, reason: told.append((num_arenas, reason))), told


def whole(arena: Arena, step: int) -> Arena:
    arena.begin(step, "")
    arena.state = ArenaState.WHOLE
    return arena


@pytest.mark.parametrize(("limit", "number"), [(100 * MB, 2), (20 * MB, 1), (10 * MB, 0)])
def test_as_many_arenas_as_memory_allows(limit: int, number: int) -> None:
    held, told = pool(limit)
    for _ in range(2):
        held.allocate(8 * MB)
    assert len(held.arenas) == number
    # A shortage of memory is reported once.
    assert [count for count, _ in told] == ([] if number == 2 else [number])


@pytest.mark.parametrize(("limit", "has_room", "nbytes"), [(100, True, 16), (40, False, 8), (10, False, 8)])
def test_copies_of_other_nodes_shards_may_find_no_room(limit: int, has_room: bool, nbytes: int) -> None:
    """They take no memory from the snapshots."""
    held, _ = pool(limit * MB)
    assert held.reserve(8 * MB, 8 * MB) is has_room
    assert all(nbytes * MB <= arena.memory.nbytes < (nbytes + 8) * MB for arena in held.arenas)


def test_the_system_may_refuse_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(SharedMemory, "create", refuse)
    held, [] = pool()
    assert held.take(MB) is None and held.arenas == []


def test_one_arena_is_made_where_two_at_once_each_got_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    create, asked = SharedMemory.create, []

    def refuse_two(name: str, nbytes: int) -> SharedMemory:
        asked.append(nbytes)
        if len(asked) <= 2:
            raise OSError(12, "Cannot allocate memory")
        return create(name, nbytes)

    monkeypatch.setattr(SharedMemory, "create", refuse_two)
    held, told = pool()
    assert held.take(MB) is not None and len(held.arenas) == 1
    assert [count for count, _ in told] == [1]


def test_a_state_that_grows_a_little_keeps_its_arenas() -> None:
    held, _ = pool()
    first = held.take(10 * MB)
    assert held.take(11 * MB) is first


def test_arenas_that_are_too_small_are_replaced_when_nobody_needs_them() -> None:
    held, _ = pool()
    held.allocate(MB)
    small = list(held.arenas)
    whole(small[0], 5).num_tasks = 1
    assert held.take(30 * MB) is not None
    assert small[0] in held.arenas and small[1] not in held.arenas


def test_a_free_arena_is_filled_first_then_the_oldest_snapshot() -> None:
    held, _ = pool()
    held.allocate(MB)
    first, second = held.arenas
    whole(second, 5)
    assert held.take(MB) is first
    whole(first, 6)
    assert held.take(MB) is second
    assert held.newest("") is first


def test_the_only_whole_snapshot_is_kept_unless_there_is_one_arena() -> None:
    held, _ = pool()
    held.allocate(MB)
    first, second = held.arenas
    whole(first, 5)
    second.begin(6, "")
    assert held.take(MB) is None
    # A damaged one is worth nothing.
    whole(second, 6).damaged = True
    assert held.take(MB) is second
    held.arenas.remove(second)
    assert held.take(MB, num_wanted=1) is first


def test_what_a_thread_still_uses_is_not_filled() -> None:
    held, _ = pool()
    held.allocate(MB)
    first, second = held.arenas
    first.num_tasks = second.num_tasks = 1
    assert held.take(MB) is None
