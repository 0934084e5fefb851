from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runner.config.schema import Config
from runner.supervisor.step_samples import StepSamples


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
    samples.learn((2, 5), 2)
    assert samples.number(6) == 20


@pytest.mark.parametrize("batch", [None, (1, 1)])
def test_what_is_known_stays(batch: tuple[int, int] | None) -> None:
    samples = step_samples((80, 10))
    samples.learn(batch, 3)
    assert samples.number(6) == 8
