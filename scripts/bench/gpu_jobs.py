"""The stages of `gpu_proof.py` that start jobs and kill them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from checkpointing.agent.events import Event, Restored, SnapshotTaken, TrainingStarted
from runner.journal.events import AttemptEnded, Entry, RankStarted
from runner.journal.journal import read_journal

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, Any]
Verdicts = dict[str, bool]
Entries = list[Entry]
E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class _Run:
    """A run of `runner start` that has ended.

    Attributes:
        code: Its exit code.
        entries: Its journal.
        killed_at: When each attempt that was killed was, in seconds since the epoch.
    """

    code: int
    entries: Entries
    killed_at: dict[int, float]


def supervised(folder: Path, *arguments: str, kills: int = 0, snapshots: int = 2) -> _Run:
    """Run `runner start` in a new folder, and kill some of its attempts.

    Args:
        folder: Of the run.
        arguments: Options of `runner start`, perhaps a script.
        kills: How many attempts are killed, from the first on.
        snapshots: After how many snapshots of the attempt.
    """
    command = [sys.executable, "-m", "runner", "start", "--output-dir", str(folder), *arguments]
    with folder.with_suffix(".out").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            killed: dict[int, float] = {}
            while process.poll() is None:
                time.sleep(0.05)
                journal = read_journal(folder / "journal.jsonl") if len(killed) < kills else []
                attempt = max((entry.attempt for entry in journal), default=0)
                entries = [entry for entry in journal if entry.attempt == attempt]
                if attempt not in killed and len(of(SnapshotTaken, entries)) >= snapshots:
                    pids = [event.pid for event in of(RankStarted, entries) if event.pid]
                    killed[attempt] = time.time()
                    os.kill(pids[-1], signal.SIGKILL)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            _keep_logs(folder)
    return _Run(process.returncode, read_journal(folder / "journal.jsonl"), killed)


def _keep_logs(folder: Path) -> None:
    """Copy a run's output, journal and logs to where the driver wants them."""
    kept = os.environ.get("GPU_PROOF_LOGS")
    if kept is None:
        return
    target = Path(kept, f"{folder.parent.name}-{folder.name}")
    target.mkdir(parents=True, exist_ok=True)
    for path in (folder.with_suffix(".out"), folder / "journal.jsonl"):
        if path.exists():
            shutil.copy(path, target)
    if (folder / "logs").is_dir():
        shutil.copytree(folder / "logs", target / "logs")


def of(kind: type[E], entries: Entries) -> list[E]:
    """Return the events of a class."""
    return [entry.event for entry in entries if isinstance(entry.event, kind)]


def _ends(entries: Entries) -> list[str]:
    """Return how the attempts ended."""
    return [event.kind for event in of(AttemptEnded, entries)]


# -- two ranks on one GPU --------------------------------------------------------------------------------------------


def ranks(on: str, quick: bool) -> tuple[Figures, Verdicts]:
    """Two ranks share a file and compare their replicas; ranks that have drifted apart are stopped."""
    from helpers import two_ranks

    devices = [on, on] if on.startswith("cuda") else [f"{on.partition(':')[0]}:{rank}" for rank in (0, 1)]
    verdicts: Verdicts = {}
    with tempfile.TemporaryDirectory() as folder:
        results = [two_ranks.run("plain", Path(folder, "run"), devices) for _ in range(2)]
        verdicts["two runs of two ranks finish"] = all(result.returncode == 0 for result in results)
        whole = two_ranks.run("whole", Path(folder, "whole"), devices)
        verdicts["resumed and uninterrupted weights are equal"] = whole.returncode == 0 and two_ranks.are_equal(
            Path(folder, "run"), Path(folder, "whole")
        )
        drifted = two_ranks.run("drift", Path(folder, "drift"), devices)
        for result in (*results, whole, drifted):
            print(result.stdout, result.stderr, sep="\n")
        verdicts["ranks that differ write no checkpoint"] = bool(re.search(two_ranks.DRIFT, drifted.stderr))
    return {"devices": ", ".join(devices)}, verdicts


# -- recovery --------------------------------------------------------------------------------------------------------

_JOB = """
import hashlib, os, sys, time
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
torch.use_deterministic_algorithms(True)
sys.path[:0] = [{bench!r}, {tests!r}]
from gpu_stages import _model
from checkpointing import CheckpointManager
print("free of the GPU before the first use:", *torch.cuda.mem_get_info(), flush=True)
model = _model("cuda:0", {parameters})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
manager = CheckpointManager(
    "unused", model=model, optimizer=optimizer, snapshot_steps=5, save_steps={steps}, keep_last=1
)
start = manager.resume(total_steps={steps})
for step in range(start + 1, {steps} + 1):
    torch.manual_seed(step)
    data = torch.randn(2048, next(model.parameters()).shape[1], device="cuda:0", dtype=torch.bfloat16)
    loss = model(data).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step, metrics={{"loss": loss.item()}})
manager.close()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
open({answer!r}, "w").write(digest.hexdigest())
"""
# The rest are other processes' contexts and the allocator's rounding.
_FREE_SHARE = 0.9
# A weight and the two moments of AdamW, in bfloat16.
_BYTES_PER_PARAMETER = 6


def recovery(on: str, quick: bool) -> tuple[Figures, Verdicts]:
    """Kill the rank of `runner start` in mid-training, five times."""
    free, _ = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    # For the newest checkpoint, and the one before until that is committed.
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    parameters = min(1e7 if quick else 3e9, 0.7 * free / 8, 0.8 * disk / 2 / _BYTES_PER_PARAMETER)
    # Each attempt begins with some thirty steps without a snapshot.
    steps, kills = (60, 2) if quick else (300, 5)
    # One after the other: a disk may hold only one checkpoint of this size.
    with tempfile.TemporaryDirectory() as folder:
        fault_free, _, _ = _trained(Path(folder, "plain"), parameters, steps, 0)
    with tempfile.TemporaryDirectory() as folder:
        killed, times, found_free = _trained(Path(folder, "killed"), parameters, steps, kills)
    figures: Figures = {"parameters": f"{parameters / 1e9:.2f} billion, {_BYTES_PER_PARAMETER} bytes of state each"}
    figures |= {f"recovery {number}, s": text for number, (_, text) in enumerate(times, 1)}
    median = statistics.median(total for total, _ in times) if times else float("inf")
    figures["from the kill to the next step, median s"] = f"{median:.2f}"
    figures["free at the beginning of each attempt, GB"] = ", ".join(f"{nbytes / 1e9:.1f}" for nbytes in found_free)
    verdicts = {
        "the same bits as the fault-free run": bool(fault_free) and fault_free == killed,
        "recovery takes 6 s at most": median <= 6.0,
        "the run survives every kill": len(times) == kills,
        "the memory of a killed rank is free before the next attempt begins": bool(found_free)
        and min(found_free) >= _FREE_SHARE * max(found_free),
    }
    return figures, verdicts


def _trained(folder: Path, parameters: float, steps: int, kills: int) -> tuple[str, list[tuple[float, str]], list[int]]:
    """Train under kills.

    Returns:
        The digest of the final weights; for each kill the seconds of the recovery and their parts in words; the free
        bytes at the beginning of each attempt.
    """
    folder.mkdir()
    script, answer, run = folder / "job.py", folder / "digest", folder / "run"
    paths = {"bench": str(Path(__file__).parent), "tests": str(ROOT / "tests"), "answer": str(answer)}
    script.write_text(_JOB.format(parameters=parameters, steps=steps, **paths))
    done = supervised(run, "--nproc-per-node", "1", str(script), kills=kills)
    entries, times = done.entries, []
    for attempt, end in [(e.attempt, e.event) for e in entries if isinstance(e.event, AttemptEnded)]:
        after = [e for e in entries if e.attempt == attempt + 1]
        began = {
            kind: e.time
            for kind in (RankStarted, TrainingStarted)
            for e in reversed(after)
            if isinstance(e.event, kind)
        }
        if attempt not in done.killed_at or len(began) < 2:
            continue
        died = done.killed_at[attempt]
        parts = {
            # The kernel first frees what the process had pinned.
            "seen dead": end.failed_at - died,
            "rank started": began[RankStarted] - died,
            "state restored": next((event.seconds for event in of(Restored, after)), 0.0),
            "training begins": began[TrainingStarted] - died,
        }
        total = parts["training begins"]
        times.append((total, "; ".join(f"{name} {value:.2f}" for name, value in parts.items())))
    logs = (path.read_text() for path in sorted(run.glob("logs/attempt-*/**/stdout.log")))
    free = [int(found[1]) for text in logs if (found := re.search(r"before the first use: (\d+)", text))]
    return (answer.read_text() if answer.exists() else ""), times, free


# -- faults ----------------------------------------------------------------------------------------------------------

# On a device that is not a GPU, the message of torch or the driver stands for the fault itself.
_FAULTY = """
import os, sys, time
import torch
from checkpointing import CheckpointManager
fault, on, at, once = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
is_gpu = on.startswith("cuda")
where = on if is_gpu else "cpu"

def strike():
    if once:
        if os.path.exists(once):
            return
        open(once, "w").close()
    if fault == "assert":
        if not is_gpu:
            raise RuntimeError("CUDA error: device-side assert triggered")
        torch.nn.functional.embedding(torch.tensor([10], device=on), torch.zeros(2, 2, device=on))
        torch.cuda.synchronize()
    elif fault == "memory":
        if not is_gpu:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")
        torch.empty(1 << 40, dtype=torch.uint8, device=on)
    elif fault == "hang":
        if not is_gpu:
            time.sleep(10_000)
        while True:
            torch.cuda._sleep(1 << 40)
            torch.cuda.synchronize()

model = torch.nn.Linear(64, 64).to(where)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
manager = CheckpointManager("unused", model=model, optimizer=optimizer, snapshot_steps=1, save_steps=5)
start = manager.resume(total_steps=12)
if at == 0:
    strike()
for step in range(start + 1, 13):
    model(torch.randn(8, 64, device=where)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if step == at:
        strike()
    manager.step(step)
manager.close()
"""

# Fault, its step (0: before the first), whether it happens once; the ends of the attempts, and the run's exit code.
_FAULTS: dict[str, tuple[str, int, bool, list[str], int]] = {
    "a device assert in every attempt": ("assert", 6, False, ["crashed", "crashed"], 78),
    "out of memory once, before the first step": ("memory", 0, True, ["out of memory", "finished"], 0),
    "out of memory in every attempt, at step 6": ("memory", 6, False, ["out of memory", "out of memory"], 78),
    "a kernel that hangs once": ("hang", 6, True, ["hung", "finished"], 0),
}


def faults(on: str, quick: bool) -> tuple[Figures, Verdicts]:
    """Cause real GPU faults and check their classification and the recovery."""
    figures: Figures = {}
    verdicts: Verdicts = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "faulty.py")
        script.write_text(_FAULTY)
        for number, (name, (fault, at, is_once, kinds, code)) in enumerate(_FAULTS.items()):
            once = str(Path(folder, f"struck-{number}")) if is_once else ""
            options = ["--nproc-per-node", "1", "--set", "restart.hang_timeout_s=8"]
            begun = time.monotonic()
            run = supervised(Path(folder, str(number)), *options, str(script), fault, on, str(at), once)
            got, ends = run.code, _ends(run.entries)
            # There may be attempts between, with a halved batch or unchanged.
            verdicts[f"{name}: exit code {code}"] = got == code and ends[:1] == kinds[:1] and ends[-1:] == kinds[-1:]
            figures[name] = f"{', '.join(ends)}; exit code {got}; {time.monotonic() - begun:.0f} s"
    return figures, verdicts


STAGES: dict[str, Callable[[str, bool], tuple[Figures, Verdicts]]] = {
    "ranks": ranks,
    "recovery": recovery,
    "faults": faults,
}
