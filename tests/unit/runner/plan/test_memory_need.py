"""What is counted, by hand; what a rank takes in truth is measured in tests/integration/test_plan.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from runner.config.load import load_config
from runner.config.schema import Config
from runner.plan.advice import choose, options
from runner.plan.memory_need import ModelShape, PlannedJob, estimate

# Llama 2 7B.
MODEL = ModelShape(
    parameters=6_738_415_616, tensors=291, linear=6_476_005_376, largest_layer=202_383_360, layers=32, hidden=4096,
    intermediate=11008, heads=32, vocab=32000, adapter=40_000_000, adapter_tensors=448,
    base_bytes=500_000_000,
)  # fmt: skip
P = MODEL.parameters
CONFIG = Path(__file__).parents[4] / "deploy" / "configs" / "smollm3-3b.yaml"


def job(loaded: bool = True, ranks: int = 8, **trainer: Any) -> PlannedJob:
    trainer = {"bf16": True, "per_device_train_batch_size": 1, "max_length": 1024, **trainer}
    config = Config.model_validate({"trainer": trainer, "model": {"name_or_path": "llama" if loaded else None}})
    return PlannedJob.of(config, ranks, ranks, on_gpu=True)


def test_ddp() -> None:
    need = estimate(MODEL, job())
    assert (need.weights, need.gradients, need.optimizer, need.buckets) == (2 * P, 2 * P, 4 * P, 2 * P)
    assert need.checkpoint_bytes == 6 * P and estimate(MODEL, job(ranks=1)).buckets == 0
    # fp16 trains fp32 weights, and casts them; so does a model made from scratch under bf16.
    for one in (job(bf16=False, fp16=True), job(loaded=False)):
        need = estimate(MODEL, one)
        assert (need.weights, need.gradients, need.optimizer, need.buckets) == (4 * P, 4 * P, 8 * P, 4 * P + 2 * P)


def test_fsdp_trains_in_fp32() -> None:
    need = estimate(MODEL, job().by("full", "fsdp"))
    assert (need.weights, need.gradients, need.optimizer) == (4 * P // 8, 4 * P // 8, 8 * P // 8)
    assert need.checkpoint_bytes == 12 * P
    # While steps are accumulated, gradients are whole.
    more = estimate(MODEL, job(gradient_accumulation_steps=4).by("full", "fsdp")).buckets - need.buckets
    assert more == 2 * (P - (P - 32 * MODEL.largest_layer) - MODEL.largest_layer)


def test_what_all_nodes_share_is_divided_by_all_ranks_and_their_snapshots_by_the_nodes() -> None:
    one = dataclasses.replace(job().by("full", "fsdp"), local_ranks=4)
    within, over_all = estimate(MODEL, one), estimate(MODEL, one.by("full", "fsdp_all_nodes"))
    assert (within.weights, over_all.weights) == (4 * P // 4, 4 * P // 8)
    assert (within.arenas, over_all.arenas) == (24 * P, 12 * P)
    assert within.checkpoint_bytes == over_all.checkpoint_bytes == 12 * P
    obstacles = {o.name: o.obstacle for o in options(MODEL, job(), 10**12)}
    assert obstacles["full, FSDP over all nodes"] == "one node"
    # 16 GB cards: neither a card nor a node's two hold it.
    pairs = dataclasses.replace(job(ranks=16), local_ranks=2)
    assert getattr(choose(options(MODEL, pairs, 16 * 10**9), pairs)[0], "name", None) == "full, FSDP over all nodes"


def test_a_mesh_cuts_the_linear_layers_and_then_shards() -> None:
    config = Config.model_validate(
        {"strategy": {"tp": 2, "dp_shard": 2}, "trainer": {"bf16": True}, "model": {"name_or_path": "llama"}}
    )
    cut = (P - MODEL.linear + MODEL.linear // 2) // 2
    need = estimate(MODEL, PlannedJob.of(config, 8, 8, on_gpu=True))
    assert (need.weights, need.gradients, need.optimizer) == (2 * cut, 2 * cut, 4 * cut)
    # Two replicas on the node, which has the state once.
    assert need.checkpoint_bytes == 6 * P and need.arenas == 2 * 6 * P
    assert need.activations < estimate(MODEL, PlannedJob.of(Config(), 8, 8, on_gpu=True)).activations
    alone = estimate(MODEL, dataclasses.replace(PlannedJob.of(config, 8, 8, on_gpu=True), dp_shard=1))
    assert (alone.weights, alone.buckets) == (2 * (P - MODEL.linear + MODEL.linear // 2), 0)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients"), [(1, 2 * P, 2 * P), (2, 2 * P, 2 * P // 8), (3, 2 * P // 8, 2 * P // 8)]
)
def test_zero_shares_more_with_each_stage(stage: int, weights: int, gradients: int) -> None:
    one = job(deepspeed={"zero_optimization": {"stage": stage}}).by("full", "deepspeed")
    need = estimate(MODEL, one)
    # Parameters in full precision, and two moments.
    assert (need.weights, need.gradients, need.optimizer) == (weights, gradients, 12 * P // 8)
    assert need.checkpoint_bytes == 14 * P and need.buckets >= 2 * 2 * 500_000_000
    found = {option.name: option for option in options(MODEL, one, 10**12)}
    assert found[f"full, DeepSpeed ZeRO-{stage}"].fits
    small = {"stage": stage, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}}
    offloading = estimate(MODEL, job(deepspeed={"zero_optimization": small}).by("full", "deepspeed"))
    assert offloading.optimizer == 0 and offloading.host_base == need.host_base + 12 * P // 8
    assert need.buckets - offloading.buckets == 2 * 2 * (500_000_000 - 1000)


def test_zero_in_full_precision_keeps_a_copy_unless_parameters_are_shared() -> None:
    needs = [
        estimate(MODEL, job(bf16=False, deepspeed={"zero_optimization": {"stage": stage}}).by("full", "deepspeed"))
        for stage in (2, 3)
    ]
    assert [need.optimizer for need in needs] == [12 * P // 8, 8 * P // 8]
    assert needs[0].checkpoint_bytes == 12 * P


def test_adapters() -> None:
    lora, qlora = (estimate(MODEL, job().by(method, "ddp")) for method in ("lora", "qlora"))
    assert lora.weights == 2 * P + 4 * MODEL.adapter and lora.checkpoint_bytes == 12 * MODEL.adapter
    assert qlora.weights == pytest.approx(0.516 * MODEL.linear + 2 * (P - MODEL.linear) + 2 * MODEL.adapter, rel=0.01)
    assert qlora.checkpoint_bytes == 6 * MODEL.adapter
    # Only what is trained is stored in fp32; gradients of the base are never gathered.
    sharded = estimate(MODEL, job(gradient_accumulation_steps=4).by("lora", "fsdp"))
    assert sharded.weights == (2 * P + 4 * MODEL.adapter) // 8 and sharded.checkpoint_bytes == 12 * MODEL.adapter
    root = P - 32 * MODEL.largest_layer
    assert sharded.buckets == 2 * (root + 2 * MODEL.largest_layer + MODEL.adapter)
    # Layers are gathered in 4 bits.
    quantised = estimate(MODEL, job(gradient_accumulation_steps=4).by("qlora", "fsdp"))
    assert quantised.weights == qlora.weights // 8
    assert quantised.buckets == pytest.approx(2 * (root + MODEL.adapter) + 0.516 * 2 * MODEL.largest_layer, rel=0.01)


@pytest.mark.parametrize(
    ("optim", "bytes_each"),
    [("adamw_torch_fused", 4), ("adamw_bnb_8bit", 2), ("sgd", 0), ("adafactor", 0), ("lion_32bit", 2)],
)
def test_optimizers(optim: str, bytes_each: int) -> None:
    assert estimate(MODEL, job(optim=optim)).optimizer == bytes_each * P


def test_the_reference_job_fits_the_card_that_it_was_run_on() -> None:
    """SmolLM3-3B, batch 28 on L40S cards of 48 GB: 42 GB were reported. The whole output alone would take 51 GB."""
    smollm3 = ModelShape(
        parameters=3_075_098_624, tensors=326, linear=2_812_280_832, largest_layer=78_123_008, layers=36, hidden=2048,
        intermediate=11008, heads=16, vocab=128_256, adapter=30_000_000, adapter_tensors=504,
        base_bytes=500_000_000,
    )  # fmt: skip
    config = load_config(str(CONFIG), {}, [])
    need = estimate(smollm3, PlannedJob.of(config, 2, 1, on_gpu=True))
    assert need.peak_bytes == pytest.approx(42e9, rel=0.15) and need.peak_bytes < 48e9
    assert need.logits < 2e9


def test_no_length_is_the_default_one() -> None:
    assert job(max_length=-1).length == job(max_length=None).length == 1024


@pytest.mark.parametrize(
    ("gigabytes", "chosen"), [(8, "LoRA, FSDP"), (19, "LoRA, DDP"), (24, "full, FSDP"), (96, "full, DDP"), (3, None)]
)
def test_the_simplest_that_fits(gigabytes: int, chosen: str | None) -> None:
    found = options(MODEL, job(), gigabytes * 10**9)
    option, why = choose(found, job())
    assert (option.name if option else None) == chosen, {o.name: o.need.peak_bytes for o in found}
    assert why
    # With one rank nothing is sharded.
    alone = choose(options(MODEL, job(ranks=1), 8 * 10**9), job(ranks=1))[0]
    assert alone is not None and alone.name == "QLoRA, DDP"
    # What is made from scratch is in no checkpoint that could be quantised.
    obstacles = {o.name: o.obstacle for o in options(MODEL, job(loaded=False), 9 * 10**9)}
    assert obstacles["QLoRA, DDP"] == "no model to quantise" and obstacles["full, DDP"] == "too large"
