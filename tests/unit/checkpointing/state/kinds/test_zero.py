"""The state of a DeepSpeed engine, in the form of any other optimizer's: without DeepSpeed, and without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.sharding import Fragment
from checkpointing.state.kinds.zero import ZeroState, is_engine
from checkpointing.state.param_names import matched_to, unnamed


class DeepSpeedZeroOptimizer:
    """What is read of the class of this name."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.loss_scaler = SimpleNamespace(cur_scale=1.0, cur_iter=0, dynamic=True)


class Point:
    """A checkpoint whose tensors are at hand."""

    def cut(self, name: str, whole: torch.Tensor, live: Any, *, in_place: bool) -> torch.Tensor:
        return sharding.cut_like(whole, live)


def engine(rank: int, ranks: int, *, dtype: torch.dtype = torch.bfloat16, steps: int = 0) -> Any:
    """An engine of ZeRO-2: two groups, of which each rank holds an equal range, padded at the end."""
    torch.manual_seed(0)
    module: Any = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 2), "two": torch.nn.Linear(2, 2)}).to(dtype)
    weights = [module["one"].weight, module["two"].weight]
    groups = [weights, [module["one"].bias, module["two"].bias]]
    base = torch.optim.AdamW([{"params": group, "weight_decay": 0.1 * n} for n, group in enumerate(groups)], lr=0.1)
    zero: Any = DeepSpeedZeroOptimizer(base)
    zero.bit16_groups, zero.single_partition_of_fp32_groups = groups, []
    for group, parameters in zip(base.param_groups, groups, strict=True):
        size = -(-sum(p.numel() for p in parameters) // ranks)
        whole = torch.cat([*(p.detach().view(-1).float() for p in parameters), torch.zeros(ranks * size)])
        flat = whole[rank * size : (rank + 1) * size].clone().requires_grad_()
        zero.single_partition_of_fp32_groups.append(flat)
        group["params"] = [flat]
        begin = 0
        for parameter in parameters:
            first, last = max(begin, rank * size), min(begin + parameter.numel(), (rank + 1) * size)
            parameter._hp_mapping = None
            if first < last:
                parameter._hp_mapping = SimpleNamespace(
                    lp_fragment_address=SimpleNamespace(start=first - begin, numel=last - first),
                    hp_fragment_address=SimpleNamespace(start=first - rank * size, numel=last - first),
                )
            begin += parameter.numel()
        for _ in range(steps):
            # As if the gradients were the parameters.
            flat.grad = flat.detach().clone()
            base.step()
        flat.grad = None
    config = SimpleNamespace(
        offload_optimizer=None,
        offload_param=None,
        zero_hpz_partition_size=1,
        zero_quantized_weights=False,
        zero_quantized_gradients=False,
        stage=2,
    )
    return SimpleNamespace(
        module=module,
        optimizer=zero,
        mpu=None,
        has_moe_layers=False,
        sequence_parallel_size=1,
        global_steps=steps,
        global_samples=4 * steps,
        micro_steps=2 * steps,
        skipped_steps=0,
        _config=SimpleNamespace(zero_config=config),
    )


def whole(states: list[Any]) -> Any:
    """Put the fragments of all ranks together."""
    first = states[0]
    if isinstance(first, Fragment):
        found = torch.full((first.tensor.numel() if not first.shape else torch.Size(first.shape).numel(),), torch.nan)
        for fragment in states:
            assert torch.isnan(found[fragment.first : fragment.last]).all(), "two ranks hold the same"
            found[fragment.first : fragment.last] = fragment.tensor.detach()
        assert not torch.isnan(found).any(), "no rank holds it"
        return found.view(first.shape)
    if isinstance(first, dict):
        return {key: whole([state[key] for state in states]) for key in first}
    return first


def everything(engines: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = whole([ZeroState(one).state_dict() for one in engines])
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def load(target: Any, state: dict[str, Any]) -> None:
    zero = ZeroState(target)
    zero.load_state_dict(sharding.cut_optimizer_state(zero.own_state(state), zero))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_continues_from_any_other(ranks: int) -> None:
    before = everything([engine(rank, 2, steps=2) for rank in range(2)])
    now = [engine(rank, ranks) for rank in range(ranks)]
    for one in now:
        load(one, before)
    assert equal(everything(now), before)
    assert now[0].global_steps == 2
    # Where a step begins depends on how its samples are cut now.
    assert now[0].micro_steps == 0


def test_the_state_is_that_of_an_optimizer_without_deepspeed() -> None:
    found = everything([engine(rank, 3, dtype=torch.float32, steps=2) for rank in range(3)])
    module = engine(0, 1, dtype=torch.float32).module
    groups = [[module["one"].weight, module["two"].weight], [module["one"].bias, module["two"].bias]]
    plain = torch.optim.AdamW([{"params": group, "weight_decay": 0.1 * n} for n, group in enumerate(groups)], lr=0.1)
    for number in range(2):
        for _ in range(2):
            for parameter in groups[number]:
                parameter.grad = parameter.detach().clone()
            kept, plain.param_groups = plain.param_groups, [plain.param_groups[number]]
            plain.step()
            plain.param_groups = kept
    expected = plain.state_dict()
    names = [group.pop("param_names") for group in found["param_groups"]]
    assert names == [["one.weight", "two.weight"], ["one.bias", "two.bias"]]
    assert equal(found["state"], expected["state"]) and equal(found["param_groups"], expected["param_groups"])
    # And the other way round.
    target = [engine(rank, 2, dtype=torch.float32) for rank in range(2)]
    for one in target:
        load(one, expected)
    assert equal(everything(target)["state"], expected["state"])


def test_other_parameters_are_refused() -> None:
    before = everything([engine(0, 1, steps=1)])
    one, other = before["param_groups"]
    before["param_groups"] = [{**unnamed(one), "params": [0]}, {**unnamed(other), "params": [1, 2, 3]}]
    with pytest.raises(ValueError, match=r"groups of \[1, 3\] parameters, the engine has \[2, 2\]"):
        load(engine(0, 1), before)
    before["param_groups"] = [one]
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, the engine has \[2, 2\]"):
        load(engine(0, 1), before)


def test_parameters_that_are_not_trained_are_left_out() -> None:
    """An optimizer of torch may have them; DeepSpeed knows only the others, and groups that are empty then."""
    before = everything([engine(0, 1, steps=1)])
    state = {number + (number > 1): value for number, value in before["state"].items()}
    first, second = before["param_groups"]
    groups = [{**first, "params": [0, 1, 2]}, {**first, "params": [9]}, {**second, "params": [3, 4]}]
    target = engine(0, 1)
    load(target, {**before, "state": state, "param_groups": groups})
    assert equal(everything([target])["state"], before["state"])


def test_a_group_of_which_nothing_is_trained_stays_empty() -> None:
    def frozen(steps: int = 0) -> Any:
        one = engine(0, 1, steps=steps)
        one.optimizer.bit16_groups.append([])
        one.optimizer.single_partition_of_fp32_groups.append(torch.empty(0))
        one.optimizer.optimizer.param_groups.append({"params": [torch.empty(0)], "lr": 0.1})
        return one

    before, target = everything([frozen(steps=1)]), frozen()
    load(target, before)
    assert equal(everything([target]), before)


def test_state_that_is_not_kept_for_each_element_is_refused() -> None:
    one = engine(0, 1, steps=1)
    next(iter(one.optimizer.optimizer.state.values()))["absmax1"] = torch.ones(3)
    with pytest.raises(CheckpointError, match="AdamW is not supported: its absmax1 is not kept for each element"):
        ZeroState(one).state_dict()


def test_before_the_first_step_there_is_no_state() -> None:
    before = everything([engine(0, 1)])
    assert before["state"] == {}
    target = engine(0, 1)
    load(target, before)
    assert not target.optimizer.optimizer.state


def test_steps_that_are_counted_by_group_are_kept_with_each_parameter() -> None:
    """As DeepSpeed's fused optimizers count them."""
    one = engine(0, 1, steps=1)
    for group in one.optimizer.optimizer.param_groups:
        group["step"] = 7
        del one.optimizer.optimizer.state[group["params"][0]]["step"]
    found = everything([one])
    assert found["state"][0]["step"].item() == 7
    target = engine(0, 1)
    for group in target.optimizer.optimizer.param_groups:
        group["step"] = 0
    load(target, found)
    assert one_group(target)[0]["step"] == 7
    # The group's count may be missing before the first step.
    fresh = engine(0, 1)
    load(fresh, found)
    assert one_group(fresh)[0]["step"] == 7


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_steps_are_counted_where_the_kernels_of_torch_read_them(option: str) -> None:
    """On the device, by fused optimizers, which transformers takes by default. `meta` stands for a GPU."""
    before, target = everything([engine(0, 1, steps=2)]), engine(0, 1)
    base = target.optimizer.optimizer
    target.optimizer.single_partition_of_fp32_groups = [
        flat.detach().to("meta").requires_grad_() for flat in target.optimizer.single_partition_of_fp32_groups
    ]
    for flat, group in zip(target.optimizer.single_partition_of_fp32_groups, base.param_groups, strict=True):
        group["params"] = [flat]
    load(target, before)
    assert {found["step"].device.type for found in base.state.values()} == {"cpu"}
    for group in before["param_groups"]:
        group[option] = True
    load(target, before)
    assert {found["step"].device.type for found in base.state.values()} == {"meta"}
    assert {found["step"].dtype for found in base.state.values()} == {torch.float32}


def test_a_training_without_deepspeed_may_have_parameters_besides_that_are_not_trained() -> None:
    """`AdamW(model.parameters())` has them, DeepSpeed has not."""
    before = everything([engine(0, 1, steps=1)])
    for number in before["param_groups"].pop()["params"]:
        del before["state"][number]
    model = engine(0, 1).module
    model["one"].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model["one"].bias, model["two"].weight, model["one"].weight])
    optimizer.load_state_dict(matched_to(optimizer, model, before))
    assert optimizer.state.keys() == {model["two"].weight, model["one"].weight}
    for number, name in enumerate(("one", "two")):
        moments = before["state"][number]["exp_avg"].to(torch.bfloat16)
        assert torch.equal(optimizer.state[model[name].weight]["exp_avg"], moments)
    # What is trained is not left out.
    model["one"].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"doesn't match the size|others, or in another order"):
        optimizer.load_state_dict(matched_to(optimizer, model, before))


def test_moments_in_16_bits_get_the_precision_that_the_engine_computes_with() -> None:
    """Those of FSDP2 and DDP have that of the model."""
    before, target = everything([engine(0, 1, steps=2)]), engine(0, 1)
    for found in before["state"].values():
        found["exp_avg"] = found["exp_avg"].bfloat16()
    load(target, before)
    base = target.optimizer.optimizer
    assert {found["exp_avg"].dtype for found in base.state.values()} == {torch.float32}
    base.param_groups[0]["params"][0].grad = torch.ones_like(base.param_groups[0]["params"][0])
    base.step()


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    before, target = everything([engine(0, 1, steps=1)]), engine(0, 1)
    base = target.optimizer.optimizer
    target.optimizer.optimizer = torch.optim.SGD([{"params": group["params"]} for group in base.param_groups], lr=0.1)
    with pytest.raises(ValueError, match="another kind of optimizer, without momentum"):
        load(target, before)


def one_group(one: Any) -> list[Any]:
    return list(one.optimizer.optimizer.param_groups[:1])


def test_the_loss_scale_continues() -> None:
    one = engine(0, 1, steps=1)
    one.optimizer.loss_scaler.cur_scale = 256.0
    target = engine(0, 1)
    load(target, everything([one]))
    assert target.optimizer.loss_scaler.cur_scale == 256.0
    # A scale that is fixed is the configuration's.
    fixed = engine(0, 1)
    fixed.optimizer.loss_scaler.dynamic = False
    load(fixed, everything([one]))
    assert fixed.optimizer.loss_scaler.cur_scale == 1.0
    load(target, everything([fixed]))
    assert target.optimizer.loss_scaler.cur_scale == 256.0


def test_parameters_in_full_precision_are_saved_where_the_model_has_less() -> None:
    found = [ZeroState(engine(rank, 2)).masters for rank in range(2)]
    precise = whole(found)
    assert precise.keys() == {"one.weight", "one.bias", "two.weight", "two.bias"}
    assert precise["one.weight"].dtype == torch.float32 and precise["one.weight"].shape == (2, 3)
    assert ZeroState(engine(0, 1, dtype=torch.float32)).masters == {}


def test_parameters_come_from_the_most_precise_source() -> None:
    one = engine(0, 2)
    zero, point = ZeroState(one), Point()
    exact = torch.full((2, 3), 1 / 3)
    with torch.no_grad():
        one.module["one"].bias.fill_(2.0)
    zero.restore_masters(point, {"one.weight": ("model.safetensors", exact)})  # type: ignore[arg-type]
    weights, biases = one.optimizer.single_partition_of_fp32_groups
    assert weights.tolist() == exact.view(-1)[:5].tolist()
    # What no file has is the model's.
    assert biases.tolist() == [2.0, 2.0]


def test_its_size_is_known_before_the_first_step() -> None:
    # 14 elements: in 16 bits, and three times in 32 bits.
    assert ZeroState(engine(0, 2)).expected_bytes(None, 2, 1) == 14 * (2 + 3 * 4)
    assert ZeroState(engine(0, 2, dtype=torch.float32)).expected_bytes(None, 2, 1) == 14 * (4 + 2 * 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda one: setattr(one, "has_moe_layers", True), "a mixture of experts"),
        (lambda one: setattr(one, "mpu", object()), "tensor parallelism"),
        (lambda one: setattr(one, "sequence_parallel_size", 2), "sequence parallelism"),
        (lambda one: setattr(one._config.zero_config, "zero_hpz_partition_size", 8), "zero_hpz_partition_size"),
        (lambda one: setattr(one._config.zero_config, "mics_shard_size", 8), "mics_shard_size"),
        (lambda one: setattr(one._config.zero_config, "zero_quantized_weights", True), "quantized"),
        (lambda one: setattr(one._config.zero_config, "zenflow", object()), "ZenFlow"),
        (lambda one: setattr(one._config.zero_config, "round_robin_gradients", True), "round_robin_gradients"),
        (lambda one: setattr(one._config.zero_config, "zero_quantized_nontrainable_weights", True), "quantized"),
        (
            lambda one: setattr(one._config.zero_config, "offload_optimizer", SimpleNamespace(device="cpu", ratio=0.5)),
            "partial offloading",
        ),
        (
            lambda one: setattr(one, "optimizer", type("SuperOffload", (DeepSpeedZeroOptimizer,), {})(None)),
            "DeepSpeed's SuperOffload",
        ),
        (
            lambda one: setattr(one._config.zero_config, "offload_optimizer", SimpleNamespace(device="nvme")),
            "NVMe",
        ),
        (lambda one: setattr(one, "optimizer", torch.optim.SGD([torch.ones(1)])), "DeepSpeed's SGD"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: Any, named: str) -> None:
    one = engine(0, 1)
    change(one)
    with pytest.raises(CheckpointError, match=named):
        ZeroState(one)


def test_no_engine_without_deepspeed() -> None:
    assert not is_engine(torch.nn.Linear(1, 1))
