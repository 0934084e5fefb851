"""Which rank holds which stage of a pipeline, and one checkpoint of all: without a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers.thread_ranks import run_ranks

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import OPTIONS_NAME, rank_object_name
from checkpointing.process.ranks import Ranks
from checkpointing.state.kinds.pipeline import PipelineState, in_order_of_layers
from checkpointing.state.param_names import matched_to

LAYERS = 4


def layer(number: int) -> torch.nn.Linear:
    # Not the generator that all threads share.
    own, made = torch.Generator().manual_seed(number), torch.nn.Linear(2, 2)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=own)
    return made


def stage(numbers: Iterable[int]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Some layers of a model of four, with the names that they have there; biases are not decayed."""
    model = torch.nn.ModuleDict({str(number): layer(number) for number in numbers})
    of = dict(model.named_parameters())
    weights, biases = ([value for name, value in of.items() if name.endswith(end)] for end in ("weight", "bias"))
    groups: list[Any] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def ran(function: Callable[[Ranks], Any], size: int) -> list[Any]:
    """Call a function as every rank; an error of any rank fails the test."""
    results = run_ranks(function, size)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    optimizer.step()


def whole_of(results: list[Any]) -> dict[Any, torch.Tensor]:
    """Put together what the ranks have written of each tensor, by name and by number and key."""
    found: dict[Any, torch.Tensor] = {}
    for weights, optimizer, parts in results:
        state = {(number, key): value for number, values in optimizer["state"].items() for key, value in values.items()}
        for name, stand_in in (weights | state).items():
            whole = found.setdefault(name, torch.full(stand_in.shape, torch.nan))
            part = parts[stand_in.untyped_storage()._cdata]
            if part.is_written and part.tensor.numel():
                assert torch.isnan(whole).all(), f"{name} is written twice"
                whole.view(-1)[:] = part.tensor
    return found


# Of each rank: one stage, or several as in an interleaved schedule and in one in the form of a V.
SPLITS = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2], [3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]]


@pytest.mark.parametrize("split", SPLITS)
def test_all_ranks_write_the_state_of_the_whole_model(split: list[list[int]]) -> None:
    def save(ranks: Ranks) -> Any:
        model, optimizer = stage(split[ranks.rank])
        stages = PipelineState(model, optimizer, ranks)
        step(optimizer)
        parts: sharding.Parts = {}
        own = sharding.stand_ins(stages.weights(model.state_dict(keep_vars=True), 9), parts)
        state = sharding.stand_ins(stages.optimizer_state(optimizer.state_dict(), 9), parts)
        return *stages.complete(own, state, parts, ranks), parts

    found = whole_of(ran(save, len(split)))
    model, optimizer = stage(range(LAYERS))
    step(optimizer)
    state = optimizer.state_dict()["state"]
    expected = model.state_dict() | {(n, key): value for n in state for key, value in state[n].items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("of_ranks", "order"),
    [
        (["embed l.0.a l.0.b l.1.a", "l.2.a norm.weight head"], "embed l.0.a l.0.b l.1.a l.2.a norm.weight head"),
        (["embed l.0 l.1 l.4", "l.2 l.3 l.5 norm"], "embed l.0 l.1 l.2 l.3 l.4 l.5 norm"),
        (["embed l.0 l.3 head", "l.1 l.2"], "embed l.0 l.1 l.2 l.3 head"),
        (["embed", "l.9 l.10", "head"], "embed l.9 l.10 head"),
        # Replicas of a stage; digits within a name do not count; not every layer is trained.
        (["a2.l.0.e.7", "a2.l.0.e.7", "a2.l.3"], "a2.l.0.e.7 a2.l.3"),
        (["head.weight"], "head.weight"),
        # Several stacks: on a stage each, on several each, interleaved, and as a V.
        (["e.0 e.1", "e.2 n d.0", "d.1 d.2 head"], "e.0 e.1 e.2 n d.0 d.1 d.2 head"),
        (["e.0", "e.1", "d.0", "d.1"], "e.0 e.1 d.0 d.1"),
        (["e.0 d.0", "e.1 d.1"], "e.0 e.1 d.0 d.1"),
        (["e.0 d.1", "e.1 d.0"], "e.0 e.1 d.0 d.1"),
        (["a.0 c.0", "b.0 c.1"], "a.0 b.0 c.0 c.1"),
        # Three stacks, on any number of ranks.
        (["e.0 b.0 d.0"], "e.0 b.0 d.0"),
        (["e.0", "b.0 d.0"], "e.0 b.0 d.0"),
        (["e.0 b.0", "d.0"], "e.0 b.0 d.0"),
        (["e.0 e.1 b.0", "d.0 d.1", "m.0"], "e.0 e.1 b.0 d.0 d.1 m.0"),
    ],
)
def test_names_are_in_the_order_of_the_layers(of_ranks: list[str], order: str) -> None:
    assert in_order_of_layers([names.split() for names in of_ranks]) == order.split()


def test_stacks_in_different_orders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the ranks have these layers in different orders: d\., e\."):
        in_order_of_layers([["e.0", "d.0"], ["d.1", "e.1"]])


def test_moments_of_another_parameter_are_refused() -> None:
    """Nothing else would notice them: torch compares no shapes."""

    def restore(ranks: Ranks) -> Any:
        model, optimizer = stage(range(2 * ranks.rank, 2 * ranks.rank + 2))
        whole = stage(range(LAYERS))[1]
        step(whole)
        state = whole.state_dict()
        state["state"][0], state["state"][4] = state["state"][4], state["state"][0]
        return PipelineState(model, optimizer, ranks).own_state(state)

    for rank, result in enumerate(run_ranks(restore, 2)):
        if rank == 0:
            assert isinstance(result, ValueError)
            assert "of 0.weight is of shape (2,), the parameter of (2, 2)" in str(result)


def test_parameters_are_found_by_name_where_the_file_has_another_order() -> None:
    """With a pipeline or without one: of three stacks in the form of a V, nobody can tell the order from the ranks."""
    whole_model, whole = stage(range(LAYERS))
    step(whole)
    names = {id(parameter): name for name, parameter in whole_model.named_parameters()}
    state = whole.state_dict()
    expected = {
        names[id(parameter)]: state["state"][number]["exp_avg"]
        for group, saved in zip(whole.param_groups, state["param_groups"], strict=True)
        for parameter, number in zip(group["params"], saved["params"], strict=True)
    }
    for group, saved in zip(whole.param_groups, state["param_groups"], strict=True):
        saved["param_names"] = [names[id(parameter)] for parameter in group["params"]][::-1]
        saved["params"] = saved["params"][::-1]

    def moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        assert "param_names" not in optimizer.param_groups[0]
        return {name: optimizer.state[value]["exp_avg"] for name, value in model.named_parameters()}

    def restore(ranks: Ranks) -> dict[str, torch.Tensor]:
        model, optimizer = stage(range(2 * ranks.rank, 2 * ranks.rank + 2))
        optimizer.load_state_dict(PipelineState(model, optimizer, ranks).own_state(state))
        return moments(model, optimizer)

    model, optimizer = stage(range(LAYERS))
    optimizer.load_state_dict(matched_to(optimizer, model, state))
    for found in (moments(model, optimizer), {**ran(restore, 2)[0], **ran(restore, 2)[1]}):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_stage_takes_its_own_part_of_a_whole_models_optimizer() -> None:
    whole = stage(range(LAYERS))[1]
    step(whole)

    def restore(ranks: Ranks) -> Any:
        model, optimizer = stage(range(2 * ranks.rank, 2 * ranks.rank + 2))
        own = PipelineState(model, optimizer, ranks).own_state(whole.state_dict())
        optimizer.load_state_dict(own)
        return [optimizer.state_dict()["state"][n]["exp_avg"] for n in range(4)]

    state = whole.state_dict()["state"]
    for rank, moments in enumerate(ran(restore, 2)):
        # Weights are numbered first, and then the biases.
        numbers = [2 * rank, 2 * rank + 1, 4 + 2 * rank, 5 + 2 * rank]
        assert all(torch.equal(own, state[n]["exp_avg"]) for own, n in zip(moments, numbers, strict=True))


def test_another_model_is_refused() -> None:
    other = torch.optim.AdamW(layer(0).parameters())

    def restore(ranks: Ranks) -> Any:
        with pytest.raises(ValueError, match=r"it has groups of \[2\] parameters, the stages \[4, 4\]"):
            PipelineState(*stage(range(2 * ranks.rank, 2 * ranks.rank + 2)), ranks).own_state(other.state_dict())

    ran(restore, 2)


def test_of_replicas_of_a_stage_one_on_each_node_writes() -> None:
    def writes(ranks: Ranks) -> Any:
        model, optimizer = stage(range(2) if ranks.rank % 2 == 0 else range(2, 4))
        stages = PipelineState(model, optimizer, ranks)
        live = model.state_dict(keep_vars=True)
        return [next(iter(stages.weights(live, size).values())).is_written for size in (2, 9)], [
            stages.is_spread(size) for size in (1, 2, 4)
        ]

    for rank, (written, spread) in enumerate(ran(writes, 4)):
        assert written == [True, rank < 2] and spread == [True, False, False]


def test_names_must_be_those_of_the_whole_model() -> None:
    def make(ranks: Ranks) -> Any:
        # As of a Sequential in each stage, which counts from 0.
        model = torch.nn.Sequential(torch.nn.Linear(2, 2 + ranks.rank))
        with pytest.raises(
            CheckpointError, match=r"0.weight is of shape \(2, 2\) in one stage and \(3, 2\) in another"
        ):
            PipelineState(model, torch.optim.SGD(model.parameters()), ranks)

    ran(make, 2)


def test_what_one_rank_cannot_save_is_refused_by_all() -> None:
    def make(ranks: Ranks) -> Any:
        model, optimizer = stage(range(2 * ranks.rank, 2 * ranks.rank + 2))
        given: Any = optimizer if ranks.rank else object()
        with pytest.raises(CheckpointError, match=r"pipeline: the optimizer is a object; use one of torch.optim"):
            PipelineState(model, given, ranks)

    ran(make, 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_stage_continues_with_its_own_options(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """All continued with those of the first. Of another number of stages, nobody knows whose they would be."""

    def resume(ranks: Ranks) -> tuple[bool, float]:
        model, optimizer = stage([ranks.rank])
        stages = PipelineState(model, optimizer, ranks)
        optimizer.param_groups[0]["lr"] = 0.1 + ranks.rank
        own = stages.files(optimizer.state_dict())[OPTIONS_NAME]
        files = {rank_object_name(OPTIONS_NAME, ranks.rank): memoryview(bytearray(own))}
        point = LoadedCheckpoint(
            "here",
            step=1,
            world_size=world_size,
            samples_consumed=1,
            files=files,
            path=None,
            private=True,
            rank=ranks.rank,
        )
        optimizer.param_groups[0]["lr"] = 0.5
        restored = stages.restore_options(point)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
        return restored, optimizer.param_groups[0]["lr"]

    same = world_size == 2
    assert ran(resume, 2) == ([(True, 0.1), (True, 1.1)] if same else [(False, 0.5), (False, 0.5)])
    assert ("other options for the optimizer of each stage" in caplog.text) is not same
