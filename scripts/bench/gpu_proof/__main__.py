"""The GPU paths on a real GPU: each stage in a process of its own, with a time limit, the most important first.

    scripts/gpu-proof [--stages memory,order,fork,engine,ranks,recovery,faults,sft] [--on cuda:0]
                      [--json FILE] [--report FILE] [--logs DIR]

Prints each stage's figures and verdicts, and exits with 1 if a verdict is bad. Without a GPU every stage is skipped,
and it exits with 0. `--on sim:0` uses the tests' simulated device (`tests/second_device`), on which some stages run on
any machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from library.benchmark import BENCH, ROOT, end_by_signals, machine
from library.workers import started

STAGES = Path(__file__).with_name("stages.py")


@dataclass(frozen=True)
class Stage:
    """A part of the proof, which runs in a process of its own."""

    name: str
    budget_s: float  # After which it is killed.
    shows: str  # For the report.
    on_any: bool = False  # Whether it also runs on a device that is not a GPU.


ALL = [
    Stage("memory", 180, "cost and benefit of pinned memory"),
    Stage("order", 300, "no snapshot is torn by work that is enqueued after it", on_any=True),
    Stage("fork", 180, "preloading does not start CUDA in the process that ranks are forked from"),
    Stage("engine", 600, "cost of a snapshot to a step", on_any=True),
    Stage(
        "ranks",
        360,
        "two ranks on one GPU: shards of one file, comparison of replicas, detection of drift",
        on_any=True,
    ),
    Stage("recovery", 600, "from a kill to the next step, and the same bits at the end"),
    Stage("faults", 360, "classification of real GPU faults, and the recovery", on_any=True),
    Stage("sft", 900, "the bundled job by several methods, each killed once; doctor and plan", on_any=True),
]


@dataclass
class Result:
    """The result of a stage; `verdicts` tells whether each statement held."""

    stage: str
    skipped: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    verdicts: dict[str, bool] = field(default_factory=dict)
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.error and all(self.verdicts.values())


def run_stage(stage: Stage, on: str, quick: bool, logs: Path | None) -> Result:
    """Run a stage to its end, or to the end of its time limit; keep what it and its jobs print in `logs`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, STAGES, stage.name, on, answer, *(["--quick"] if quick else [])]
        path = os.pathsep.join([str(ROOT), str(BENCH), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        kept = logs / stage.name if logs is not None else Path(folder, "logs")
        kept.mkdir(parents=True)
        environment = {"PYTHONPATH": path, "TMPDIR": folder, "GPU_PROOF_LOGS": str(kept)}
        log = kept / "stage.out"
        # At the end, its jobs are killed, too, which would be in the next stage's way.
        with started(command, log, environment, piped=False) as process:
            try:
                status = process.wait(stage.budget_s)
                lines = log.read_text().strip().splitlines() or ["it printed no reason"]
                error = "" if status == 0 else lines[-1]
            except subprocess.TimeoutExpired:
                error = f"exceeded its limit of {stage.budget_s:.0f} s"
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    seconds = round(time.monotonic() - began, 1)
    return Result(stage.name, "", seconds, found.get("figures", {}), found.get("verdicts", {}), error)


def device_in_words(on: str) -> str | None:
    """Describe the device, its driver and versions; None without a GPU."""
    code = (
        "import torch; assert torch.cuda.is_available(); "
        "print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda or torch.version.hip, sep=', ')"
    )
    if not on.startswith("cuda"):
        return f"{on}: no GPU, figures say nothing about one"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def report(results: list[Result], device: str) -> str:
    """Return the page `docs/benchmarks/gpu.md`."""
    today = datetime.date.today().isoformat()
    lines = [
        "# GPU paths on a GPU",
        "",
        f"`scripts/gpu-proof`, {today}, on {device}; {machine()}; Python {sys.version.split()[0]}.",
        "",
    ]
    for stage in ALL:
        result = next((one for one in results if one.stage == stage.name), None)
        if result is None:
            continue
        lines += [f"## {stage.name}: {stage.shows}", ""]
        if result.skipped or result.error:
            lines += [result.skipped or f"**failed**: {result.error}", ""]
        if result.verdicts or result.figures:
            lines += ["| | |", "|---|---|"]
            lines += [f"| {name} | {'yes' if good else '**no**'} |" for name, good in result.verdicts.items()]
            lines += [f"| {name} | {value} |" for name, value in result.figures.items()]
            lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stages", default=",".join(stage.name for stage in ALL), help="comma-separated list (default: all)"
    )
    parser.add_argument("--on", default="cuda:0", help="the device (default: cuda:0)")
    parser.add_argument("--quick", action="store_true", help="small models and few steps")
    parser.add_argument("--json", type=Path, help="write figures and verdicts to this file")
    parser.add_argument("--report", type=Path, help="write the page to this file, e.g. docs/benchmarks/gpu.md")
    parser.add_argument("--logs", type=Path, help="keep what the stages and their jobs print in this new folder")
    options = parser.parse_args()
    end_by_signals()
    wanted = options.stages.split(",")
    unknown = set(wanted) - {stage.name for stage in ALL}
    if unknown:
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; choose from {', '.join(s.name for s in ALL)}")
    device = device_in_words(options.on)
    results = []
    for stage in ALL:
        if stage.name not in wanted:
            continue
        if device is None:
            result = Result(stage.name, skipped="no GPU: skipped")
        elif not options.on.startswith("cuda") and not stage.on_any:
            result = Result(stage.name, skipped=f"skipped: needs a GPU, not {options.on}")
        else:
            result = run_stage(stage, options.on, options.quick, options.logs)
        results.append(result)
        verdict = result.skipped or ("good" if result.is_good else f"BAD {result.error}".strip())
        print(f"{stage.name:9} {verdict} ({result.seconds:.0f} s)", flush=True)
        for name, good in result.verdicts.items():
            print(f"    {'yes' if good else 'NO '} {name}")
        for name, value in result.figures.items():
            print(f"    {name}: {value}")
    if options.json is not None:
        document = {"device": device, "machine": machine(), "stages": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.report is not None and device is not None:
        options.report.write_text(report(results, device))
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
