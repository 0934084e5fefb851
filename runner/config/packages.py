"""Packages that a configured job needs besides those of the extra `sft`, so that a missing one is named at once."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path

from checkpointing.host.environment import not_installed
from runner.config.schema import Config

# Trackers whose package has another name than they have in `report_to`.
_TRACKER_MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}
# Modules that pip knows by another name.
_TRACKER_PACKAGES = {"azureml": "azureml-core"}
# What transformers takes flash_attention_2 from: the package itself, compiled kernels of the Hub, an NPU's.
_FLASH_MODULES = ("flash_attn", "kernels", "torch_npu")
# By a pattern of the name of an optimizer, its module, and what pip installs.
_OPTIMIZERS = (
    (r"galore_.*", "galore_torch", "galore-torch"),
    (r"apollo_.*", "apollo_torch", "apollo-torch"),
    (r"(ada)?lomo", "lomo_optim", "lomo-optim"),
    (r"grokadamw", "grokadamw", "grokadamw"),
    (r"schedule_free_.*", "schedulefree", "schedulefree"),
    (r"stable_adamw", "optimi", "torch-optimi"),
    (r"adamw_torch_(4|8)bit", "torchao", "torchao"),
    (r"adamw_anyprecision", "torchdistx", "torchdistx"),
    (r".*(8bit|bnb|paged).*|lion_32bit|ademamix", "bitsandbytes", "bitsandbytes"),
)


def missing_package(config: Config) -> tuple[str, str] | None:
    """Return a key that asks for what this environment lacks, and what is wrong; None if there is none."""
    if config.tracking.aim_repo is not None and not _is_installed("aim"):
        why = not_installed("Aim", "aim") if sys.version_info < (3, 13) else "Aim has no release for Python 3.13"
        return "tracking.aim_repo", f"tracking.aim_repo is set, and {why}; install it, or unset this key"
    if config.model.attn_implementation == "flash_attention_2" and not any(map(_is_installed, _FLASH_MODULES)):
        key = "model.attn_implementation"
        # It is built by pip, against the torch that is there: an extra of ours could not be installed.
        return key, f"{key}=flash_attention_2 needs a package; pip install --no-build-isolation flash-attn, or kernels"
    optimizer = str(config.trainer.get("optim"))
    for pattern, module, name in _OPTIMIZERS:
        if re.fullmatch(pattern, optimizer):
            if _is_installed(module):
                break
            return "trainer.optim", f"trainer.optim={optimizer} needs the package; pip install {name}"
    if config.trainer.get("use_liger_kernel") and not _is_installed("liger_kernel"):
        return "trainer.use_liger_kernel", "trainer.use_liger_kernel needs the package; pip install liger-kernel"
    problem = _missing_tracker(config.trainer.get("report_to"))
    return ("trainer.report_to", problem) if problem is not None else None


def _missing_tracker(given: object) -> str | None:
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    known = _trackers()
    for name in names:
        if names in (["all"], ["none"]) or not known:
            break
        if name not in known:
            return f"trainer.report_to={name!r} is not allowed: use none, all, {', '.join(known)}"
        module = _TRACKER_MODULES.get(name, name)
        others = ("tensorboardX",) if name == "tensorboard" else ()
        if name != "kubeflow" and not any(_is_installed(one) for one in (module, *others)):
            package = _TRACKER_PACKAGES.get(module, module.replace("_", "-"))
            return f"trainer.report_to={name} needs the package; pip install {package}"
    return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def _trackers() -> tuple[str, ...]:
    """Return the names that `report_to` takes, from the source of transformers; empty where they are not found."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return ()
    path = Path(spec.origin).parent / "integrations" / "integration_utils.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["INTEGRATION_TO_CALLBACK"]:
                return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return ()
