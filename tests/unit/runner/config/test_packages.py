"""What a job asks for and this environment lacks is named before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from runner.config import packages
from runner.config.load import load_config, parse_setting
from runner.config.packages import missing_package
from runner.config.schema import Config
from runner.errors import UsageError
from runner.program.program import Program


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_is_installed", lambda module: False)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("sections", "key", "part"),
    [
        ({"tracking": {"aim_repo": "/aim"}}, "tracking.aim_repo", "tracking.aim_repo is set, and Aim "),
        ({"trainer": {"report_to": "wandb"}}, "trainer.report_to", "pip install wandb"),
        ({"trainer": {"report_to": ["tensorboard", "clearml"]}}, "trainer.report_to", "pip install tensorboard"),
        ({"trainer": {"report_to": "azure_ml"}}, "trainer.report_to", "pip install azureml-core"),
        ({"trainer": {"report_to": "nonesuch"}}, "trainer.report_to", "use none, all, azure_ml, comet_ml, mlflow"),
        ({"trainer": {"optim": "galore_adamw"}}, "trainer.optim", "pip install galore-torch"),
        ({"trainer": {"optim": "paged_adamw_8bit"}}, "trainer.optim", "pip install bitsandbytes"),
        ({"trainer": {"optim": "adamw_torch_8bit"}}, "trainer.optim", "pip install torchao"),
        ({"trainer": {"use_liger_kernel": True}}, "trainer.use_liger_kernel", "pip install liger-kernel"),
        (
            {"model": {"attn_implementation": "flash_attention_2"}},
            "model.attn_implementation",
            "flash-attn, or kernels",
        ),
    ],
)
def test_a_package_that_is_missing(sections: dict[str, Any], key: str, part: str) -> None:
    missing = missing_package(Config.model_validate(sections))
    assert missing is not None and missing[0] == key and part in missing[1]


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("trainer", [{}, {"report_to": "none"}, {"report_to": ["all"]}, {"optim": "adamw_torch_fused"}])
def test_a_job_that_needs_none(trainer: dict[str, Any]) -> None:
    assert missing_package(Config.model_validate({"trainer": trainer})) is None


@pytest.mark.parametrize("module", ["flash_attn", "kernels", "torch_npu"])
def test_attention_that_transformers_finds_elsewhere(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_is_installed", lambda asked: asked == module)
    assert missing_package(Config.model_validate({"model": {"attn_implementation": "flash_attention_2"}})) is None


def test_packages_that_are_installed() -> None:
    for trainer in ({"report_to": ["tensorboard", "wandb"]}, {"optim": "adamw_bnb_8bit"}):
        assert missing_package(Config.model_validate({"trainer": trainer})) is None


@pytest.mark.usefixtures("nothing_installed")
def test_the_source_is_named_and_a_program_is_not_asked() -> None:
    """Where aim was not installed, a run ended with 78 after it had started."""
    with pytest.raises(UsageError, match=r"^environment variable AIM_REPO: tracking\.aim_repo is set, and Aim "):
        load_config(None, {"AIM_REPO": "/aim"})
    load_config(None, {"AIM_REPO": "/aim"}, program=Program("script", "/x/train.py"))
    load_config(None, {}, [parse_setting("tracking.aim_repo=/aim")], needs_data=False)
