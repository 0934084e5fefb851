"""The stage that runs the bundled job by several methods, each killed once."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_proof.jobs import Found, supervised
from library.benchmark import ROOT

from checkpointing.agent.events import Log, Resumed

# Small jobs, each with a processor core or two.
_JOBS_AT_ONCE = 6


def sft(on: str, quick: bool) -> Found:
    """Run the bundled job by several methods, each undisturbed and killed; then `doctor` and `plan` on this machine."""
    figures: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        num_gpus = torch.cuda.device_count() if on.startswith("cuda") else 0
        variants = _variants(Path(folder), num_gpus)
        killed_once = functools.partial(_killed_once, Path(folder), 2 if num_gpus > 1 else 1)
        # Others load the model that it writes.
        results = {"full": killed_once("full", variants.pop("full"))}
        with ThreadPoolExecutor(_JOBS_AT_ONCE) as pool:
            results |= dict(zip(variants, pool.map(killed_once, variants.keys(), variants.values()), strict=True))
        for name, (text, is_good) in results.items():
            figures[name], verdicts[f"{name}: killed, resumed, finished"] = text, is_good
        for command in ("doctor", "plan"):
            done = subprocess.run(
                [sys.executable, "-m", "runner", command, "--output-dir", str(Path(folder, command))],
                capture_output=True,
                text=True,
                timeout=300,
                cwd=ROOT,
            )
            verdicts[f"runner {command} works"] = done.returncode in (0, 1) and "Traceback" not in done.stderr
            figures[f"runner {command}"] = " / ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
    return figures, verdicts


def _killed_once(folder: Path, ranks: int, name: str, options: Sequence[str]) -> tuple[str, bool]:
    """Run the bundled job, and again, killed once; return what happened, and whether it resumed and finished."""
    begun = time.monotonic()
    settings = ["trainer.max_steps=24", "checkpoint.snapshot_steps=2", *options]
    arguments = ["--nproc-per-node", str(ranks), *(word for option in settings for word in ("--set", option))]
    calm, _ = supervised(folder / name, *arguments)
    run, _ = supervised(folder / f"{name}-killed", *arguments, kills=1)
    codes = calm.process.returncode, run.process.returncode
    resumed = [event.step for event in run.all(Resumed)]
    losses = [event.loss for event in run.all(Log)]
    digests = [_digest(folder / each / "best_model") for each in (name, f"{name}-killed")]
    text = (
        f"exit codes {codes[0]}, {codes[1]}; resumed from step {resumed}; "
        f"{'the same' if digests[0] == digests[1] else 'other'} bits as undisturbed"
        f"{f', last loss {losses[-1]:.3f}' if losses else ''}; {time.monotonic() - begun:.0f} s"
    )
    return text, codes == (0, 0) and bool(resumed) and resumed[0] > 0


def _digest(folder: Path) -> str:
    """Digest a model's weights."""
    weights = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest() if weights else str(folder)


def _variants(folder: Path, num_gpus: int) -> dict[str, list[str]]:
    """Return the options of each variant by name; `full` comes first, because others load the model that it writes."""
    found = {"full": [], "lora": ["method.type=lora"]}
    if not num_gpus:
        return found
    quantized = ["method.type=qlora", f"model.name_or_path={folder / 'full' / 'best_model'}"]
    found |= {
        "fp16": ["trainer.bf16=false", "trainer.fp16=true"],
        "compile": ["trainer.torch_compile=true"],
        # Otherwise its kernels add some gradients in any order.
        "compile-deterministic": ["trainer.torch_compile=true", "trainer.full_determinism=true"],
        "exact": ["elastic.mode=exact", "elastic.virtual_ranks=4"],
    }
    if has("bitsandbytes"):
        found["adamw-8bit"] = ["trainer.optim=adamw_8bit"]
        found["qlora"] = quantized
    if num_gpus > 1:
        # The job uses it for several ranks only.
        sharded = ["full", "lora", "compile", *(["qlora"] if "qlora" in found else [])]
        found |= {f"fsdp-{name}": ["strategy=fsdp", *found[name]] for name in sharded}
        found["fsdp-recompute"] = ["strategy=fsdp", "trainer.gradient_checkpointing=true"]
    if has("deepspeed"):
        deepspeed = functools.partial(_deepspeed, folder)
        found |= {f"zero-{stage}": deepspeed(stage) for stage in (1, 2, 3)}
        found["zero-2-fp16"] = [*deepspeed(2), *found["fp16"]]
        found["zero-3-lora"] = [*deepspeed(3), "method.type=lora"]
        # Its own optimizers, which are compiled at their first use.
        found["zero-2-fused"] = deepspeed(2, optimizer=True)
        found["zero-3-offload"] = deepspeed(3, optimizer=True, offload=True)
    if has("flash_attn"):
        found["flash-attn"] = ["model.attn_implementation=flash_attention_2"]
    return found


def has(name: str) -> bool:
    """Return whether a library is installed."""
    return importlib.util.find_spec(name) is not None


def _deepspeed(folder: Path, stage: int, *, optimizer: bool = False, offload: bool = False) -> list[str]:
    """Write a configuration as users of DeepSpeed have it, perhaps with its own optimizer; return the settings."""
    automatic = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    )
    config: dict[str, Any] = dict.fromkeys(automatic, "auto")
    config |= {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    config["zero_optimization"] = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    config["zero_allow_untested_optimizer"] = True
    if optimizer:
        parameters = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": parameters}
    file = folder / f"zero-{stage}{'-own' * optimizer}{'-offload' * offload}.json"
    file.write_text(json.dumps(config))
    return ["strategy=deepspeed", f"trainer.deepspeed={file}"]
