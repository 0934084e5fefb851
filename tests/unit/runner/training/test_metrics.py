from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infra.parts import require
from transformers import SmolLM3Config, SmolLM3ForCausalLM, TrainerControl, TrainerState

from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.process import device
from runner.training import metrics as module
from runner.training.metrics import AimTracker


def test_perplexity_is_e_to_the_loss() -> None:
    found = module.perplexities({"loss": 1.5, "eval_loss": 2.0, "grad_norm": 3.0})
    assert found == {"perplexity": round(math.exp(1.5), 4), "eval_perplexity": round(math.exp(2.0), 4)}
    assert module.perplexities({"loss": 1e6}) == {} == module.perplexities({"loss": "?"})


def test_operations_of_a_token() -> None:
    """6 per parameter, and twice two products of the attention for each layer, thrice with the backward."""
    config = SmolLM3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = SmolLM3ForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert module.flops_per_token(model, 96) == 6 * parameters + 12 * 2 * 32 * 96
    # Packed as bitsandbytes does it, two weights in a byte.
    weight: Any = model.lm_head.weight
    packed: Any = torch.nn.Parameter(torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(shape=weight.shape)
    assert module._num_elements(packed) == weight.numel() == module._num_elements(weight)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("AMD Instinct MI300X", None),
        ("Tesla T4", 65e12),
        ("?", None),
    ],
)
def test_peak_of_a_device(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "name_of", lambda: name)
    assert module._peak_flops() == peak


def test_what_is_measured_is_added_to_the_entry_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, seen = module.MetricsCallback(), module.MetricsCallback()
    handler = SimpleNamespace(callbacks=[seen, metrics])
    trainer = SimpleNamespace(
        callback_handler=handler,
        get_batch_samples=lambda: "batch",
        model_wrapped=None,
        model=None,
        _manager=SimpleNamespace(stall_s=0.5),
    )
    metrics.watch(trainer)
    assert handler.callbacks == [metrics, seen] and trainer.get_batch_samples() == "batch"
    args, state = SimpleNamespace(world_size=2), SimpleNamespace(is_world_process_zero=True, global_step=5)
    times = iter([10.0, 12.0])
    clock = SimpleNamespace(monotonic=lambda: next(times), perf_counter=time.perf_counter)
    monkeypatch.setattr(module, "time", clock)
    control: Any = None
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(lost_steps=3, reached_step=9).to_json())
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    state.max_steps = 7
    metrics.on_train_begin(args, state, control)
    for tokens in (1000, 1400):
        metrics.on_step_end(args, state, control)
        logs = {"loss": 2.0, "num_tokens": tokens}
        metrics.on_log(args, state, control, logs)
        trainer._manager.stall_s += 0.25
    # Three before this attempt, and from the step that the last one had finished back to where this one starts.
    assert logs["lost_steps"] == 3 + 9 - 5 and logs["checkpoint_stall_s"] == 0.25
    assert logs["tokens_per_s"] == 200.0 and logs["tokens_per_s_per_rank"] == 100.0
    assert logs["data_wait_s"] >= 0 and logs["peak_memory_gb"] > 0 and logs["attempt"] == 0 and logs["nodes"] == 3
    state.is_world_process_zero = False
    logs = {"loss": 1.0}
    metrics.on_log(args, state, control, logs)
    assert logs == {"loss": 1.0}


OPEN = """
import os, signal, sys
from aim.sdk.repo import DB
from runner.training.metrics import AimTracker
if sys.argv[2] == "killed":
    DB.run_upgrades = lambda self: os.kill(os.getpid(), signal.SIGKILL)
run = AimTracker(sys.argv[1], "e", "somewhere")._open()
run.track(1.0, name="loss", step=1)
run.close()
"""


@pytest.mark.process
def test_a_rank_killed_while_it_makes_the_repository(tmp_path: Path) -> None:
    """It was half made for ever: every later attempt said that it cannot be used."""
    require("Aim")
    repo = tmp_path / "aim"

    def opened(how: str) -> int:
        command = [sys.executable, "-c", OPEN, str(repo), how]
        return subprocess.run(command, timeout=300).returncode

    assert opened("killed") == -signal.SIGKILL and not (repo / ".aim").exists()
    assert opened("well") == 0 and (repo / ".aim" / "VERSION").exists()
    assert opened("well") == 0
    assert [path.name for path in repo.iterdir()] == [".aim"], "nothing of the first one is left"


LOCKED = """
import sys
from pathlib import Path
from runner.training.metrics import AimTracker
tracker = AimTracker(sys.argv[1], "e", "somewhere")
tracker._make_repository()
(Path(sys.argv[1]) / ".aim" / "locks" / f"{tracker._hash}.softlock").write_text(sys.argv[2])
run = tracker._open()
run.track(1.0, name="loss", step=1)
run.close()
"""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", marks=pytest.mark.soak, id="empty"),
        pytest.param("4242\nvm-17\n99\n", marks=pytest.mark.process, id="of the lock's library only"),
    ],
)
def test_a_rank_killed_as_it_takes_the_lock_of_a_new_run(content: str, tmp_path: Path) -> None:
    """Aim cannot parse such a lock: it refused this run for good, and its repository stayed empty."""
    require("Aim")
    done = subprocess.run([sys.executable, "-c", LOCKED, str(tmp_path / "aim"), content], timeout=300)
    assert done.returncode == 0


class SlowRun:
    """Stands for a run of Aim."""

    def __init__(self, write_s: float) -> None:
        self.write_s = write_s
        self.steps: list[int] = []

    def set(self, *args: Any, **kwargs: Any) -> None: ...

    def log_info(self, *args: Any) -> None: ...

    def close(self) -> None: ...

    def track(self, value: float, *, step: int, **kwargs: Any) -> None:
        time.sleep(self.write_s)
        self.steps.append(step)


class SlowTracker(AimTracker):
    """A tracker whose import of Aim, opening and writing take so long."""

    def __init__(self, import_s: float = 0, open_s: float = 0, write_s: float = 0) -> None:
        super().__init__("somewhere", "e", "checkpoints")
        self.import_s, self.open_s, self.run = import_s, open_s, SlowRun(write_s)

    def _import(self) -> None:
        time.sleep(self.import_s)
        self._imported.set()

    def _open(self) -> SlowRun:
        time.sleep(self.open_s)
        return self.run


def train(tracker: SlowTracker, num_steps: int = 3) -> None:
    args: Any = SimpleNamespace(to_sanitized_dict=dict)
    state, control = TrainerState(), TrainerControl()
    tracker.on_train_begin(args, state, control)
    for step in range(1, num_steps + 1):
        state.global_step = step
        tracker.on_log(args, state, control, {"loss": 1.0})


@pytest.fixture(autouse=True)
def aim_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: object()))
    monkeypatch.setattr("runner.training.metrics.importlib", found)


def test_the_end_waits_for_the_import_of_aim(caplog: pytest.LogCaptureFixture) -> None:
    """A short attempt on a busy machine was over before Aim was there; when all were, the run had no curve."""
    tracker = SlowTracker(import_s=0.3)
    train(tracker)
    tracker.close(patience_s=0.1)
    assert tracker.run.steps == [1, 2, 3] and not caplog.text


def test_the_end_waits_while_points_are_written(caplog: pytest.LogCaptureFixture) -> None:
    tracker = SlowTracker(write_s=0.05)
    train(tracker, 10)
    tracker.close(patience_s=0.2)
    assert tracker.run.steps == [*range(1, 11)] and not caplog.text


@pytest.mark.parametrize(
    ("slow", "patience_s", "limit_s"),
    [({"open_s": 30.0}, 0.1, 60), ({"import_s": 30.0}, 0.1, 0.2), ({"write_s": 0.3}, 60, 0.3)],
    ids=["repository that does not answer", "import over the limit", "points over the limit"],
)
def test_the_end_does_not_wait_for_ever(
    slow: dict[str, float], patience_s: float, limit_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = SlowTracker(**slow)
    train(tracker, 100)
    began = time.monotonic()
    tracker.close(patience_s, limit_s)
    assert time.monotonic() - began < 15
    assert "did not accept all points before training ended" in caplog.text
