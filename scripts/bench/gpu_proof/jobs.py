"""The stages that start jobs and kill them."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from library.training_run import TrainingRun

from checkpointing.agent.events import Restored, SnapshotTaken, TrainingStarted
from runner.journal.events import AttemptEnded, RankStarted

# The figures of a stage, and whether each of its statements holds.
Found = tuple[dict[str, Any], dict[str, bool]]


def supervised(
    folder: Path, *arguments: str, kills: int = 0, snapshots: int = 2
) -> tuple[TrainingRun, dict[int, float]]:
    """Run `runner start` in a new folder; kill its first `kills` attempts after so many snapshots.

    Returns:
        The run, which has ended, and the time of each kill by its attempt, in seconds since the epoch.
    """
    command = [sys.executable, "-m", "runner", "start", "--output-dir", str(folder), *arguments]
    killed: dict[int, float] = {}
    try:
        with TrainingRun(command, folder, {"TMPDIR": tempfile.gettempdir()}, alone=False) as run:
            while run.process.poll() is None:
                time.sleep(0.05)
                if len(killed) == kills:
                    continue
                attempt = max((entry.attempt for entry in run.journal()), default=0)
                taken = [entry for entry in run.find(SnapshotTaken) if entry.attempt == attempt]
                rank = run.rank()
                if attempt not in killed and len(taken) >= snapshots and rank is not None:
                    killed[attempt] = time.time()
                    rank.kill()
    finally:
        _keep_logs(folder)
    run.refresh()
    return run, killed


def _keep_logs(folder: Path) -> None:
    """Copy a run's output, journal and logs to where the driver wants them."""
    kept = os.environ.get("GPU_PROOF_LOGS")
    if kept is None:
        return
    target = Path(kept, f"{folder.parent.name}-{folder.name}")
    target.mkdir(parents=True, exist_ok=True)
    for path in (folder / "output.log", folder / "journal.jsonl"):
        if path.exists():
            shutil.copy(path, target)
    if (folder / "logs").is_dir():
        shutil.copytree(folder / "logs", target / "logs")


# -- two ranks on one GPU --------------------------------------------------------------------------------------------


def ranks(on: str, quick: bool) -> Found:
    """Two ranks share a file and compare their replicas; ranks that have drifted apart are stopped."""
    from helpers import two_ranks

    devices = [on, on] if on.startswith("cuda") else [f"{on.partition(':')[0]}:{rank}" for rank in (0, 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = [two_ranks.run("plain", folder / "run", devices) for _ in range(2)]
        whole = two_ranks.run("whole", folder / "whole", devices)
        drifted = two_ranks.run("drift", folder / "drift", devices)
        for result in (*results, whole, drifted):
            print(result.stdout, result.stderr, sep="\n")
        are_equal = whole.returncode == 0 and two_ranks.are_equal(folder / "run", folder / "whole")
    verdicts = {
        "two runs of two ranks finish": all(result.returncode == 0 for result in results),
        "resumed and uninterrupted weights are equal": are_equal,
        "ranks that differ write no checkpoint": bool(re.search(two_ranks.DRIFT, drifted.stderr)),
    }
    return {"devices": ", ".join(devices)}, verdicts


# -- recovery --------------------------------------------------------------------------------------------------------

# The rest are other processes' contexts and the allocator's rounding.
_FREE_SHARE = 0.9
# A weight and the two moments of AdamW, in bfloat16.
_BYTES_PER_PARAMETER = 6


def recovery(on: str, quick: bool) -> Found:
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
    figures = {"parameters": f"{parameters / 1e9:.2f} billion, {_BYTES_PER_PARAMETER} bytes of state each"}
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
        The digest of the final weights; of each kill the recovery's seconds, and its parts in words; the free bytes at
        the beginning of each attempt.
    """
    answer, script = folder.with_suffix(".digest"), str(Path(__file__).with_name("job.py"))
    arguments = ["--nproc-per-node", "1", script, str(parameters), str(steps), str(answer)]
    run, killed = supervised(folder, *arguments, kills=kills)
    times = []
    for attempt, end in [(e.attempt, e.event) for e in run.entries if isinstance(e.event, AttemptEnded)]:
        after = [e for e in run.entries if e.attempt == attempt + 1]
        # The first of each.
        began = {type(e.event): e.time for e in reversed(after)}
        if attempt not in killed or not {RankStarted, TrainingStarted} <= began.keys():
            continue
        died = killed[attempt]
        parts = {
            # The kernel first frees what the process had pinned.
            "seen dead": end.failed_at - died,
            "rank started": began[RankStarted] - died,
            "state restored": next((e.event.seconds for e in after if isinstance(e.event, Restored)), 0.0),
            "training begins": began[TrainingStarted] - died,
        }
        times.append((parts["training begins"], "; ".join(f"{name} {value:.2f}" for name, value in parts.items())))
    logs = (path.read_text() for path in sorted(folder.glob("logs/attempt-*/**/stdout.log")))
    free = [int(found[1]) for text in logs if (found := re.search(r"before the first use: (\d+)", text))]
    return (answer.read_text() if answer.exists() else ""), times, free


# -- faults ----------------------------------------------------------------------------------------------------------

# Fault, its step (0: before the first), whether it happens once; the ends of the attempts, and the run's exit code.
_FAULTS: dict[str, tuple[str, int, bool, list[str], int]] = {
    "a device assert in every attempt": ("assert", 6, False, ["crashed", "crashed"], 78),
    "out of memory once, before the first step": ("memory", 0, True, ["out of memory", "finished"], 0),
    "out of memory in every attempt, at step 6": ("memory", 6, False, ["out of memory", "out of memory"], 78),
    "a kernel that hangs once": ("hang", 6, True, ["hung", "finished"], 0),
}


def faults(on: str, quick: bool) -> Found:
    """Cause real GPU faults and check their classification and the recovery."""
    figures: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    script = str(Path(__file__).with_name("faulty.py"))
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (fault, at, is_once, kinds, code)) in enumerate(_FAULTS.items()):
            once = str(Path(folder, f"struck-{number}")) if is_once else ""
            options = ["--nproc-per-node", "1", "--set", "restart.hang_timeout_s=8"]
            begun = time.monotonic()
            run, _ = supervised(Path(folder, str(number)), *options, script, fault, on, str(at), once)
            got, ends = run.process.returncode, [event.kind for event in run.all(AttemptEnded)]
            # There may be attempts between, with a halved batch or unchanged.
            verdicts[f"{name}: exit code {code}"] = got == code and ends[:1] == kinds[:1] and ends[-1:] == kinds[-1:]
            figures[name] = f"{', '.join(ends)}; exit code {got}; {time.monotonic() - begun:.0f} s"
    return figures, verdicts
