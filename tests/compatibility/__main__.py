"""Runs the table of compatibility cases: python -m compatibility [--write FILE] [--jobs N] [--ranks N] [PATTERN ...]

Prints a line for each case; exits 1 when any has another verdict than the expected one. `--write` adds what was run to a
JSON file, from which the Markdown beside it is made: a cell that was not run says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import os
import re
import sys
import time
from pathlib import Path

from compatibility.harness import ForkServer, Outcome
from compatibility.table import Case

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "sentence-transformers", "torchdata")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/compatibility", description="Run the compatibility table.")
    parser.add_argument("patterns", nargs="*", help="Regular expressions; cases whose names match any of them.")
    parser.add_argument("--write", type=Path, help="Markdown file for the table; only with all cases.")
    parser.add_argument("--jobs", type=int, default=2, help="Cases that run at the same time (default 2).")
    parser.add_argument("--keep", type=Path, help="Folder for the logs and results of cases with a wrong verdict.")
    parser.add_argument("--list", action="store_true", help="Print the names and expected verdicts only.")
    options = parser.parse_args()
    began = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    with ForkServer() as server:
        table = {name: case for name, (case, _) in server.cases.items() if case.in_table}
        names = [name for name in table if not options.patterns or any(re.search(p, name) for p in options.patterns)]
        if options.list:
            print(*(f"{table[name].verdict.kind:10} {name}" for name in names), sep="\n")
            return 0

        def judge(name: str) -> Outcome:
            return server.judge(name, options.keep / name.replace("/", "_") if options.keep else None)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            judged = {pool.submit(judge, name): name for name in names}
            for done in concurrent.futures.as_completed(judged):
                name = judged[done]
                outcomes[name] = outcome = done.result()
                print(_line(table[name], outcome), flush=True)
    seconds = time.monotonic() - began
    wrong = [name for name, outcome in outcomes.items() if not outcome.matches(table[name].verdict)]
    kinds = sorted({outcome.kind for outcome in outcomes.values()})
    counts = ", ".join(f"{sum(one.kind == kind for one in outcomes.values())} {kind}" for kind in kinds)
    print(f"{len(outcomes)} cases in {seconds:.0f} s: {counts}; {len(wrong)} with an unexpected verdict")
    if options.write:
        if options.patterns:
            parser.error("--write needs all cases: leave the patterns out")
        options.write.write_text(_document(table, outcomes, seconds, counts))
    return 1 if wrong else 0


def _line(case: Case, outcome: Outcome) -> str:
    right = outcome.matches(case.verdict)
    note = outcome.note if not right or outcome.kind == "refused" else ""
    expected = "" if right else f" (expected: {case.verdict.kind} {case.verdict.detail})"
    mark = "ok  " if right else "FAIL"
    return f"{mark} {outcome.kind:10} {outcome.seconds:5.1f} s  {case.name}{expected}  {_cell(note)}"


def _document(table: dict[str, Case], outcomes: dict[str, Outcome], seconds: float, counts: str) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES if _installed(name))
    lines = [
        "# Compatibility",
        "",
        "Written by `scripts/compatibility`. Each case trains for a few steps on 2 ranks (gloo, CPU): once without a",
        "failure, and once killed with SIGKILL and restarted.",
        "",
        "- *identical*: batches, losses, final parameters and buffers, optimizer, scheduler and generator states are",
        "  equal bit for bit. For trainers, batches and final parameters are also equal to those without `resilient`.",
        "- *refused*: training does not start, or ends at the first save, with the message in the last column.",
        "- *differs*: for the reason in the last column.",
        "",
        f"{len(outcomes)} cases: {counts}. {datetime.date.today().isoformat()}, {os.cpu_count()} CPU cores, "
        f"{seconds:.0f} s; {versions}.",
        "",
        "| case | verdict | note |",
        "|---|---|---|",
    ]
    for name in sorted(table):
        if name not in outcomes:
            continue
        outcome, verdict = outcomes[name], table[name].verdict
        kind = outcome.kind if outcome.matches(verdict) else f"**{outcome.kind}, expected {verdict.kind}**"
        note = verdict.detail if outcome.kind == verdict.kind == "differs" else outcome.note
        lines.append(f"| {name} | {kind} | {_cell(note)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    short = " ".join(text.split())
    return (short if len(short) <= 300 else f"{short[:100]} ... {short[-200:]}").replace("|", "\\|")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
