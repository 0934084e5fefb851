"""Drives real runs from outside, by the commands a user would type."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from runner.config.schema import DEFAULT_CONFIG

RUNNER = [str(Path(sys.executable).with_name("runner"))]
# One epoch of the bundled job (dropout on), a checkpoint every 20 steps, all kept.
SHORT_JOB = ["--set", "trainer.num_train_epochs=1", "--set", "trainer.save_total_limit=20"]
TOTAL_STEPS = 70
SAVE_STEPS = 20

# A script can be made to crawl after a step, so that a test acts long before its end; stops are agreed on at nearly
# every step then. At that pace:
CRAWL_S = 0.5

# Logs and saves do not fall together in it; a step takes at least 0.1 s.
PLAIN_HF_SCRIPT = """
import sys
import torch
from datasets import Dataset
from transformers import SmolLM3Config, SmolLM3ForCausalLM, Trainer, TrainingArguments
from checkpointing.transformers import resilient

assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "60"]
torch.manual_seed(0)
model = SmolLM3ForCausalLM(SmolLM3Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, attention_dropout=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
rows = Dataset.from_dict({"input_ids": torch.randint(3, 64, (96, 16)).tolist()})
rows = rows.map(lambda row: {"labels": row["input_ids"]})
args = TrainingArguments(
    FOLDER, max_steps=int(sys.argv[2]), per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=10,
    use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=7, dataloader_pin_memory=False,
    max_grad_norm=0.5, dataloader_num_workers=NUM_WORKERS)
trainer = resilient(Trainer(model=model, args=args, train_dataset=rows))
trainer.add_callback(SLOW)
trainer.train()
print("script finished on rank", args.process_index)
"""
SLOW = """
import os, time
from checkpointing.host.environment import rank_settings
from transformers import TrainerCallback
class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        chosen = rank_settings().attempt == ATTEMPT
        time.sleep(CRAWL_S if chosen and state.global_step > CRAWL else 0.1)
        while chosen and state.global_step == GATE and not os.path.exists(FOLDER + ".open"):
            time.sleep(0.02)
"""


def script(
    folder: Path, num_workers: int = 0, crawl: int = TOTAL_STEPS, gate: int = TOTAL_STEPS, attempt: int = 1
) -> list[str]:
    """60 steps, a commit every 10.

    Args:
        crawl: it crawls after this step of the attempt.
        gate: it stands still after this one until there is a file `hf.open` in the folder.
    """
    path = folder / "train.py"
    text = crawling(SLOW, crawl) + PLAIN_HF_SCRIPT.replace("SLOW", "Slow()").replace("NUM_WORKERS", str(num_workers))
    text = text.replace("FOLDER", repr(str(folder / "hf"))).replace("GATE", str(gate))
    path.write_text(text.replace("ATTEMPT", str(attempt)))
    return [str(path), "--steps", "60"]


# A plain Trainer with dropout; `at_step(step, attempt)` is called on every rank when a step has ended.
TROUBLED_SCRIPT = """
import os, sys, time
import torch
from datasets import Dataset
from transformers import SmolLM3Config, SmolLM3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from checkpointing.host.environment import rank_settings
from checkpointing.transformers import resilient

RANK, ATTEMPT = int(os.environ["RANK"]), rank_settings().attempt
class Trouble(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(CRAWL_S if ATTEMPT == 1 and state.global_step > CRAWL else 0.05)
        at_step(state.global_step, args)
    def on_prediction_step(self, args, state, control, **_):
        at_evaluation(state.global_step)
def at_step(step, args): pass
def at_evaluation(step): pass
TROUBLE
torch.manual_seed(0)
model = SmolLM3ForCausalLM(SmolLM3Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, attention_dropout=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
rows = Dataset.from_dict({"input_ids": torch.randint(3, 64, (96, 16)).tolist()})
rows = rows.map(lambda row: {"labels": row["input_ids"]})
args = TrainingArguments(
    FOLDER, max_steps=40, per_device_train_batch_size=4, save_steps=10, use_cpu=True, report_to="none",
    disable_tqdm=True, logging_steps=5, dataloader_pin_memory=False, OPTIONS)
trainer = resilient(Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows))
trainer.add_callback(Trouble())
trainer.train()
"""


def troubled(folder: Path, trouble: str = "", options: str = "", crawl: int = TOTAL_STEPS) -> list[str]:
    """A script of 40 steps (a commit every 10) that gets into trouble by itself; `crawl` as of `script`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "troubled.py"
    text = TROUBLED_SCRIPT.replace("TROUBLE", textwrap.dedent(trouble)).replace("FOLDER", repr(str(folder / "hf")))
    path.write_text(crawling(text.replace("OPTIONS", options), crawl))
    return [str(path)]


def crawling(text: str, after: int) -> str:
    return text.replace("CRAWL_S", str(CRAWL_S)).replace("CRAWL", str(after))


class Run:
    """One `runner start` on a folder; may be started again."""

    def __init__(self, folder: Path, *options: str, script: list[str] | None = None) -> None:
        self.folder = folder
        self.command = [
            *RUNNER,
            "start",
            "--resume",
            "auto",
            "--output-dir",
            str(folder),
            *options,
            *(script or []),
        ]
        self.process: subprocess.Popen[str] | None = None
        self.output = ""

    def start(self, **environment: str) -> Run:
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        return self

    def start_held(self, step: int, *failpoints: str, **environment: str) -> Run:
        """Start it so that a rank stands still at the end of its `step`-th step, once: the test acts while all wait.

        Only a rank's end, or the run's, ends that. If a rank ends before (see `wait_until_held`), the next attempt may
        stand still.

        Args:
            failpoints: others that are armed too, each to fire once.
        """
        self.fired.mkdir(parents=True)
        at = self.command.index("start") + 1
        self.command[at:at] = ["--set", "restart.hang_timeout_s=600"]
        armed = "; ".join([*failpoints, f"training.step=hang@{step}"])
        return self.start(CHECKPOINT_FAILPOINTS=armed, CHECKPOINT_FAILPOINTS_ONCE=str(self.fired), **environment)

    @property
    def fired(self) -> Path:
        """A file for each failpoint of `start_held` that has fired."""
        return self.folder.with_name(f"{self.folder.name}.fired")

    def wait_until_held(self) -> None:
        wait_until(self, (self.fired / "training.step").exists)

    def finish(self, timeout_s: float = 500) -> int:
        assert self.process is not None
        try:
            self.output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.output, _ = self.process.communicate()
            raise AssertionError(f"the run did not end; it said:\n{self.output}") from None
        return self.process.returncode

    def end(self) -> None:
        """By two signals, which is at once; the second one after the first has arrived."""
        self.signal(signal.SIGTERM)
        process = self.process
        assert process is not None
        wait_until(self, lambda: process.poll() is not None or self.events("stop_requested"))
        if process.poll() is None:
            self.signal(signal.SIGTERM)
        assert self.finish() == 75, self.output

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if name is None or event["event"] == name]

    def wait_for_step(self, step: int, attempt: int | None = None) -> int:
        """Until a log entry of at least this step (in this attempt) is in the journal; returns its step."""

        def steps() -> list[int]:
            return [event["step"] for event in self.events("log") if attempt in (None, event["attempt"])]

        wait_until(self, lambda: max(steps(), default=0) >= step)
        return max(steps())

    def rank_pid(self, rank: int) -> int:
        pid: int = next(e["pid"] for e in reversed(self.events("rank_started")) if e["rank"] == rank)
        return pid

    def launcher_pid(self) -> int:
        return int(self.events("attempt_started")[-1]["launcher_pid"])

    def agent_pid(self) -> int:
        return int(self.events("attempt_started")[-1]["agent_pid"])

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def run_id(self) -> str:
        return str(json.loads((self.folder / "run.json").read_text())["run_id"])

    def processes(self, run_id: str | None = None) -> list[psutil.Process]:
        """Living processes that carry this run's id; to be given where its folder cannot be read."""
        if run_id is None:
            if not (self.folder / "run.json").exists():  # stopped before it had a name
                return []
            run_id = self.run_id()
        found = []
        for process in psutil.process_iter():
            try:
                if f"RUNNER_RUN_ID={run_id}/".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
            except OSError:
                continue
        return found

    def leftovers(self) -> list[str]:
        """What still lives of this run: nothing, once `runner start` has ended."""
        events = self.events("attempt_started")
        pids = {event[key] for event in events for key in ("launcher_pid", "agent_pid")}
        # Numbers are used again: a helper is as old as its attempt.
        born_before = max((event["time"] for event in events), default=0.0)
        living = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).create_time() <= born_before:
                    living.append(f"helper {pid}")
        return living + [str(process) for process in self.processes()]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"checkpoint-{step}"

    def _dead(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        return f"the run ended early:\n{self.process.stdout.read()}"


def bundled(run: Run) -> Run:
    """Have it train the bundled model, also where its options name other data."""
    at = run.command.index("start") + 1
    run.command[at:at] = ["--config", str(DEFAULT_CONFIG)]
    return run


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all workers of `pytest -n`."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def finished_once(folder: Path, *options: str, script: Callable[[], list[str]] | None = None) -> Run:
    """A run by whichever worker needs it first; the others wait for it, and write its script when nobody reads it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.with_name(f"{folder.name}.output")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = Run(folder, *options, script=script() if script else None)
        if output.exists():
            run.output = output.read_text()
        else:
            assert run.start().finish() == 0, run.output
            output.write_text(run.output)
    return run


def wait_for_commit(run: Run, step: int) -> None:
    """Until a checkpoint of at least this step is committed."""
    wait_until(run, lambda: any(event["step"] >= step for event in run.events("committed")))


def wait_until(run: Run, condition: Callable[[], object]) -> None:
    """Until it holds, which the run must live to see."""
    while True:
        assert run.process is not None
        # Asked first: what it does last may be what is waited for.
        alive = run.process.poll() is None
        if condition():
            return
        assert alive, run._dead()
        time.sleep(0.02)


def wait_for_events(run: Run, name: str, count: int = 1) -> None:
    wait_until(run, lambda: len(run.events(name)) >= count)


def state_hash(checkpoint: Path) -> str:
    """SHA-256 over all parameters and the whole optimizer state."""
    digest = hashlib.sha256()
    weights = next(path for name in ("model", "adapter_model") if (path := checkpoint / f"{name}.safetensors").exists())
    for name, tensor in sorted(load_file(weights).items()):
        digest.update(name.encode() + raw(tensor))
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for index, state in sorted(optimizer["state"].items()):
        for name, tensor in sorted(state.items()):
            digest.update(f"{index}.{name}".encode() + raw(tensor))
    digest.update(json.dumps(optimizer["param_groups"], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def loss_curve(checkpoint: Path) -> list[tuple[int, float]]:
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]


def history(checkpoint: Path) -> list[dict[str, float]]:
    """Everything logged but for what says how long it took."""
    entries = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    timed = ("runtime", "samples_per_second", "steps_per_second", "tokens_per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in entries]
