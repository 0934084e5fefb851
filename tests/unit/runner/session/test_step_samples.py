from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.agent.events import BatchShape
from runner.config.schema import Config
from runner.recovery.policy import BatchDivision
from runner.recovery.restart_state import RestartState
from runner.session.step_samples import StepSamples


def step_samples(newest: tuple[int, int] | None, *, counts: bool = True, has_script: bool = False) -> StepSamples:
    trainer = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    config = Config.model_validate({"model": {"name_or_path": "model"}, "trainer": trainer})
    manifest: Any = SimpleNamespace(samples_consumed=newest[0], step=newest[1]) if newest else None
    return StepSamples(config, manifest, counts=counts, has_script=has_script)


def test_the_checkpoint_counts_before_the_configuration() -> None:
    assert step_samples((80, 10)).number(6) == 8
    assert step_samples((0, 0)).number(6) == 72 == step_samples(None).number(6)
    assert step_samples((80, 10), counts=False).number(6) == 72


def test_of_a_script_only_what_its_ranks_have_reported_is_known() -> None:
    samples = step_samples(None, has_script=True)
    samples.learn(None, 2)
    assert samples.number(6) is None
    assert samples.learn(BatchShape(micro_batch=2, accumulation=5), 2)
    assert samples.number(6) == 20 and not samples.may_be_uneven


@pytest.mark.parametrize(("virtual_ranks", "number"), [(None, 6), (8, 8)])
def test_virtual_ranks_are_what_is_shared(virtual_ranks: int | None, number: int) -> None:
    elastic = {"mode": "exact", "virtual_ranks": virtual_ranks}
    config = Config.model_validate({"model": {"name_or_path": "model"}, "elastic": elastic})
    newest: Any = SimpleNamespace(samples_consumed=480, step=10)
    samples = StepSamples(config, newest, counts=True, has_script=False)
    assert samples.number(6) == number and samples.may_be_uneven and samples.parts == "virtual ranks"
    # A script says how many it has.
    script = StepSamples(config, newest, counts=True, has_script=True, shared=4)
    assert script.number(6) == (virtual_ranks or 4)


def test_ranks_that_compute_the_same_samples_count_as_one() -> None:
    samples = step_samples(None, has_script=True)
    shape = BatchShape(micro_batch=2, accumulation=5, model_ranks=2)
    assert samples.learn(shape, 4) and samples.number(8) == 20 and samples.model_ranks == 2
    assert not samples.learn(shape, 4)


@pytest.mark.parametrize("batch", [None, BatchShape(micro_batch=1, accumulation=1)])
def test_what_is_known_stays(batch: BatchShape | None) -> None:
    samples = step_samples((80, 10))
    assert not samples.learn(batch, 3)
    assert samples.number(6) == 8


def test_samples_that_any_number_of_ranks_can_share() -> None:
    """Three ranks share 8 samples in two micro-batches of up to 2 each, which are not 12."""
    samples = step_samples(None, has_script=True)
    shape = BatchShape(micro_batch=2, accumulation=2, samples=8)
    assert samples.learn(shape, 3) and samples.number(6) == 8 and samples.may_be_uneven
    assert not samples.learn(shape, 3)
    # The next attempt's ranks say otherwise: the script has changed.
    assert samples.learn(BatchShape(micro_batch=2, accumulation=2), 2) and not samples.may_be_uneven


def test_what_an_earlier_session_was_told_is_known(tmp_path: Path) -> None:
    config = Config.model_validate({"output_dir": str(tmp_path / "run")})
    state = RestartState(batch=BatchDivision(2, 2, 1, 8, 2))
    known = StepSamples.of(
        config, None, RestartState.from_json(state.to_json(1)), config.tiers.catalog, has_script=True
    )
    assert known.may_be_uneven and known.model_ranks == 2
