"""Ranks are forks of a process that has imported much: nothing in it may start the accelerator's driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from integration.support import Run

from runner.launcher.launch_request import EVERYTHING
from runner.system.processes import PRELOAD_ENV

# What libraries that are optional to transformers and TRL may bring, as far as an import shows.
OPTIONAL = {
    "flash_attn": "2.8.3",
    "flash_attn_interface": "3.0.0",
    "kernels": "0.18.2",
    "liger_kernel": "0.8.0",
    "torchao": "0.18.0",
    "bitsandbytes": "0.50.0",
    "xformers": "0.0.35",
}
# A torch that was built with CUDA on a machine with one GPU, whose driver counts how often it is started.
FAKE_CUDA = """
import importlib.machinery, json, sys, types

class AnyModule(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        # As flash_attn and liger, then bitsandbytes, then torchao (which asks whether Triton works) when imported.
        import torch
        torch.cuda.is_available(), torch.cuda.device_count()
        answers.append(torch.cuda.get_device_capability(torch.cuda.device(0)))
        answers.append(torch.cuda.get_device_properties(torch.cuda.current_device()).name)
        # A class, or a decorator that changes nothing.
        made = {"__init__": lambda self, *args, **options: None, "__call__": lambda self, wrapped=None: wrapped}
        return type(name, (), made)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = AnyModule(spec.name)
        module.__version__ = OPTIONAL[spec.name.partition(".")[0]]
        return module
    def exec_module(self, module):
        pass

OPTIONAL = json.loads(sys.argv[1])
sys.path.insert(0, sys.argv[2])
sys.meta_path.insert(0, Finder())
import torch
starts, asked, answers = [], [], []

def start(name):
    def called(*args):
        import traceback
        starts.append((name, traceback.format_stack(limit=8)))
        return 1
    return called

def monitor():
    asked.append(1)
    return 1

torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = monitor
for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_setDevice", "_cuda_getDevice", "_cuda_isDriverSufficient",
             "_cuda_getCurrentRawStream", "_cuda_getCompiledVersion"):
    setattr(torch._C, name, start(name))
torch.cuda._lazy_init = start("_lazy_init")
properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
torch.cuda._get_device_properties = lambda index: properties
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
import runner.training.preload
print(json.dumps({"starts": starts, "asked": len(asked), "answers": answers, "loaded": sorted(sys.modules)}))
"""


def preload(tmp_path: Path, **environment: str) -> dict[str, Any]:
    """What importing everything that ranks need does to the driver, where all optional libraries are installed."""
    for name, version in OPTIONAL.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "top_level.txt").write_text(name)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-c", FAKE_CUDA, json.dumps(OPTIONAL), str(tmp_path)],
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"},
            PRELOAD_ENV: " ".join(EVERYTHING),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_ranks_are_forked_from_leaves_the_driver_alone(tmp_path: Path) -> None:
    found = preload(tmp_path, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert not found["starts"], found["starts"]
    # It was all imported, and asked for. flash_attn itself is imported by the models that use it.
    wanted = {"runner.training.job", "trl.trainer.sft_trainer", "kernels", "torchao", "bitsandbytes"}
    assert found["asked"] and not wanted.difference(found["loaded"])
    assert [9, 0] in found["answers"] and "NVIDIA H200" in found["answers"]


@pytest.mark.soak
def test_without_the_variable_that_the_runner_sets_the_driver_would_be_started(tmp_path: Path) -> None:
    """The test of the test above."""
    assert "_cuda_getDeviceCount" in {name for name, _ in preload(tmp_path)["starts"]}


@pytest.mark.parametrize(
    "error",
    [
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
        "start method",
        pytest.param("CUDA error: initialization error", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_cannot_use_a_fork_start_as_fresh_interpreters(error: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            # Only what was forked has it.
            if "runner.training.preload" in sys.modules:
                raise RuntimeError({error!r})
            print("trained")
            """
        )
    )
    run = Run(tmp_path / "run", "--nproc-per-node", "1", script=[str(script)]).start()
    assert run.finish() == 0, run.output
    assert "trained" in run.output and "start as fresh interpreters" in run.output
    assert len(run.events("attempt_started")) == 2 and len(run.events("cold_start")) == 1
