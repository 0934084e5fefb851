"""What ranks find out about each other's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.thread_ranks import run_ranks

from checkpointing.errors import ReplicasDrifted
from checkpointing.files.file_images import FileImage
from checkpointing.files.sharding import Part
from checkpointing.files.torch_files import TorchFileLayout
from checkpointing.format.boxes import Region
from checkpointing.process.ranks import Ranks
from checkpointing.state import replicas
from checkpointing.state.captured_state import CapturedState
from checkpointing.state.kinds.state_kind import WholeState
from checkpointing.state.replicas import ReplicaComparison, describe_differing_ranks

WHOLE = WholeState(None, None, Ranks())


def state(weight: float = 1.0, buffer: float = 0.0) -> CapturedState:
    model = {"weight": torch.full((3,), weight), "mean": torch.full((2,), buffer)}
    return CapturedState("m", WHOLE, model, frozenset({"weight"}), frozenset({"mean"}), {}, {}, {}, {}, False, [])


def optimizer(moment: float = 0.0) -> FileImage:
    return TorchFileLayout("optimizer.pt").image({"moment": torch.full((4,), moment)})


def test_equal_replicas_pass() -> None:
    # Made by one thread: torch.save's options belong to the process.
    images = [optimizer() for _ in range(3)]

    def compare(ranks: Ranks) -> int:
        return ReplicaComparison(ranks).check_equal(5, state(), images[ranks.rank], lambda: 9)

    assert run_ranks(compare, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("where", "text"), [("weight", "first in weight"), ("moment", r"first in the optimizer's state \(byte \d+\)")]
)
def test_a_rank_that_differs_is_named(where: str, text: str) -> None:
    odds = [float(rank == 1) for rank in range(3)]
    own = [(state(1.0 + odd), optimizer()) if where == "weight" else (state(), optimizer(odd)) for odd in odds]

    def compare(ranks: Ranks) -> int:
        return ReplicaComparison(ranks).check_equal(5, *own[ranks.rank], lambda: 0)

    for error in run_ranks(compare, 3):
        with pytest.raises(ReplicasDrifted, match=rf"^step 5: rank 1 holds other values .* in 1 of 2 tensors, {text}"):
            raise error  # type: ignore[misc]


def test_a_difference_says_nothing_where_a_rank_has_changed_its_state() -> None:
    image = optimizer()

    def compare(ranks: Ranks) -> int:
        return ReplicaComparison(ranks).check_equal(5, state(1.0 + ranks.rank), image, lambda: 4 * ranks.rank)

    assert run_ranks(compare) == [4, 4]


def sharded(rank: int, half: int, weight: float = 1.0) -> CapturedState:
    """The state of a rank that holds half of the rows of `weight`, and of a moment."""
    held = Region((((2 * half, 2 * half + 2),), ((0, 3),)))
    parts: dict[int, Part] = {}
    stand_ins = [torch.empty(4, 3), torch.empty(4, 3)]
    for stand_in, value in zip(stand_ins, (weight, 0.0), strict=True):
        tensor = torch.full((2, 3), value)
        parts[stand_in.untyped_storage()._cdata] = Part((4, 3), held, tensor, (), rank < 2, "(Replicate(), Shard(0))")
    model = {"weight": stand_ins[0]}
    return CapturedState(
        "m", WHOLE, model, frozenset({"weight"}), frozenset(), {"moment": stand_ins[1]}, {}, {}, parts, True, []
    )


@pytest.mark.parametrize("halves", [[0, 1], [0, 1, 0, 1], [0, 0, 1, 1]])
def test_equal_parts_pass(halves: list[int]) -> None:
    def compare(ranks: Ranks) -> int:
        own = sharded(ranks.rank, halves[ranks.rank], weight=1.0 + halves[ranks.rank])
        return ReplicaComparison(ranks).check_parts_equal(5, own, lambda: 9)

    assert run_ranks(compare, len(halves)) == [0] * len(halves)


def test_a_part_that_differs_between_its_holders_is_named() -> None:
    def compare(ranks: Ranks) -> int:
        own = sharded(ranks.rank, ranks.rank % 2, weight=1.0 + (ranks.rank == 3))
        return ReplicaComparison(ranks).check_parts_equal(5, own, lambda: 0)

    for error in run_ranks(compare, 4):
        with pytest.raises(ReplicasDrifted, match=r"^step 5: ranks 1, 3 hold the same part of weight, but with 2 diff"):
            raise error  # type: ignore[misc]


def test_a_part_that_a_rank_has_changed_meanwhile_says_nothing() -> None:
    def compare(ranks: Ranks) -> int:
        own = sharded(ranks.rank, 0, weight=float(ranks.rank))
        return ReplicaComparison(ranks).check_parts_equal(5, own, lambda: 4 * ranks.rank)

    assert run_ranks(compare) == [4, 4]


def test_what_one_rank_alone_holds_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "fingerprint", lambda tensors: pytest.fail("read"))

    def compare(ranks: Ranks) -> int:
        return ReplicaComparison(ranks).check_parts_equal(5, sharded(ranks.rank, ranks.rank), lambda: 0)

    assert run_ranks(compare) == [0, 0]


def test_buffers_and_further_states_that_differ_are_found() -> None:
    def foreign(rank: int) -> dict[str, FileImage]:
        states: dict[str, Any] = {"same": {"a": torch.ones(2)}, "own": {"rank": rank}}
        return {name: TorchFileLayout(f"{name}.pt").image(value) for name, value in states.items()}

    images = [foreign(rank) for rank in range(2)]

    def compare(ranks: Ranks) -> frozenset[str]:
        return ReplicaComparison(ranks).differing_names(state(buffer=ranks.rank), images[ranks.rank])

    assert run_ranks(compare) == [frozenset({"mean", "own"})] * 2
    assert ReplicaComparison(Ranks()).differing_names(state(), {}) == frozenset()


def test_every_rank_gets_all_small_files() -> None:
    image = optimizer()

    def gather(ranks: Ranks) -> dict[str, bytes]:
        return ReplicaComparison(ranks).gather_files(5, {f"rng_{ranks.rank}": bytes([ranks.rank])}, [image])

    assert run_ranks(gather) == [{"rng_0": b"\0", "rng_1": b"\1"}] * 2


def test_files_that_are_laid_out_differently_are_refused() -> None:
    images = [TorchFileLayout("optimizer.pt").image({"moment": torch.zeros(4 + rank)}) for rank in range(2)]

    def gather(ranks: Ranks) -> Any:
        return ReplicaComparison(ranks).gather_files(5, {}, [images[ranks.rank]])

    for error in run_ranks(gather):
        with pytest.raises(ReplicasDrifted, match=r"^step 5: the 2 ranks hold different values in the shapes"):
            raise error


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ([[1, 2], [1, 2]], None),
        ([[1, 2], [1, 3]], "the 2 ranks hold different values"),
        ([[1, 2], [1, 3], [1, 2]], "rank 1 holds other values than the others"),
        ([[1], [2], [1], [3], [1]], "ranks 1, 3 hold other values than the others"),
        ([[1], [2], [1], [2]], "the 4 ranks hold different values"),
    ],
)
def test_the_rank_that_is_not_as_the_others_is_named(sums: list[list[int]], text: str | None) -> None:
    assert describe_differing_ranks(sums) == text
