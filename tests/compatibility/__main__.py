"""Runs the table of compatibility cases: python -m compatibility [--write FILE] [--jobs N] [--ranks N] [PATTERN ...]

Prints a line for each case; exits 1 when any has another verdict than the expected one. `--write` adds this run to a
JSON file, from which the Markdown next to it is made: a cell that was not run says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import re
import sys
import time
from pathlib import Path

from compatibility import results
from compatibility.harness import ForkServer, Outcome
from compatibility.table import Case


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/compatibility", description="Run the compatibility table.")
    parser.add_argument("patterns", nargs="*", help="Regular expressions; cases whose names match any of them.")
    parser.add_argument("--write", type=Path, help="Markdown file of the table, to which this run is added.")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(one) for one in text.split(",")],
        help="Numbers of ranks to run each case on, such as 1,2,3,4,8; default: the case's own, mostly 2.",
    )
    parser.add_argument("--jobs", type=int, default=2, help="Cases that run at the same time (default 2).")
    parser.add_argument("--keep", type=Path, help="Folder for the logs and results of cases with a wrong verdict.")
    parser.add_argument("--list", action="store_true", help="Print the names and expected verdicts only.")
    options = parser.parse_args()
    began = time.monotonic()
    outcomes: dict[tuple[str, int], Outcome] = {}
    with ForkServer() as server:
        table = {name: case for name, (case, _) in server.cases.items() if case.in_table}
        names = [name for name in table if not options.patterns or any(re.search(p, name) for p in options.patterns)]
        if options.list:
            print(*(f"{table[name].verdict.kind:10} {name}" for name in names), sep="\n")
            return 0

        def judge(name: str, ranks: int) -> Outcome:
            keep = options.keep / f"{name.replace('/', '_')}-{ranks}" if options.keep else None
            return server.judge(name, keep, ranks)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            wanted = [(name, ranks) for name in names for ranks in options.ranks or [table[name].ranks]]
            judged = {pool.submit(judge, *one): one for one in wanted}
            for done in concurrent.futures.as_completed(judged):
                name, ranks = judged[done]
                outcomes[name, ranks] = outcome = done.result()
                print(_line(table[name], ranks, outcome), flush=True)
                if options.write:
                    results.add(options.write, name, ranks, outcome, table[name])
    seconds = time.monotonic() - began
    wrong = [one for one, outcome in outcomes.items() if not outcome.matches(table[one[0]].verdict)]
    kinds = sorted({outcome.kind for outcome in outcomes.values()})
    counts = ", ".join(f"{sum(one.kind == kind for one in outcomes.values())} {kind}" for kind in kinds)
    print(f"{len(outcomes)} cases in {seconds:.0f} s: {counts}; {len(wrong)} with an unexpected verdict")
    return 1 if wrong else 0


def _line(case: Case, ranks: int, outcome: Outcome) -> str:
    right = outcome.matches(case.verdict)
    note = outcome.note if not right or outcome.kind == "refused" else ""
    expected = "" if right else f" (expected: {case.verdict.kind} {case.verdict.detail})"
    mark = "ok  " if right else "FAIL"
    return (
        f"{mark} {outcome.kind:10} {outcome.seconds:5.1f} s  {ranks} ranks  {case.name}{expected}  {results.cell(note)}"
    )


if __name__ == "__main__":
    sys.exit(main())
