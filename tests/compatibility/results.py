"""What was run of the table, kept between runs in a JSON file, and the Markdown that is made of it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from compatibility.harness import Outcome
from compatibility.table import Case

RANKS = (1, 2, 3, 4, 8)
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "sentence-transformers")


def add(markdown: Path, name: str, ranks: int, outcome: Outcome, case: Case) -> None:
    """Add one outcome to the JSON file next to the page, and write the page."""
    path = markdown.with_suffix(".json")
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    right = outcome.matches(case.verdict)
    kind = outcome.kind if right else f"**{outcome.kind}**"
    note = case.verdict.detail if right and outcome.kind == "differs" else outcome.note
    if outcome.kind != "skipped":
        cells = document["cases"].setdefault(name, {})
        cells[str(ranks)] = {"kind": kind, "note": cell(note), "date": datetime.date.today().isoformat()}
    document["machine"] = f"{os.cpu_count()} CPU cores"
    document["versions"] = {one: importlib.metadata.version(one) for one in _PACKAGES if _installed(one)}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    markdown.write_text(page(document))


def page(document: dict[str, Any]) -> str:
    """Return the page."""
    cases = document["cases"]
    dates = sorted(one["date"] for cells in cases.values() for one in cells.values())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    strategies = {name: cells for name, cells in cases.items() if name.startswith("strategies/")}
    others = {name: cells for name, cells in cases.items() if name not in strategies}
    lines = [
        "# Compatibility",
        "",
        "Written by `scripts/compatibility`. Each case trains for some steps on gloo and CPUs: once without a failure,",
        "and once killed with SIGKILL and restarted. A column is a number of ranks; `-` was not tried.",
        "",
        "- *identical*: batches, losses, final parameters and buffers, optimizer, scheduler and generator states are",
        "  equal bit for bit. For trainers, batches and final parameters are also equal to those without `resilient`.",
        "- *refused*: training does not start, or ends at the first save, with the message in the last column.",
        "- *differs*: for the reason in the last column. **Bold**: not what was expected.",
        "",
        f"{dates[0]} to {dates[-1]}, {document['machine']}; {versions}.",
        "",
        "## Ways to share a model among ranks",
        "",
        "Undisturbed twice, and killed after steps 1, 2, 3 and 8. `LoRA`: layers that stay as they are, with small",
        "ones that are trained.",
        "",
        *_tables(strategies),
        "",
        "## Jobs",
        "",
        *_tables(others),
    ]
    return "\n".join(lines) + "\n"


def _tables(cases: dict[str, dict[str, Any]]) -> list[str]:
    """Return a short table of the cases that are identical on all numbers of ranks, and one of the others."""
    identical = {
        name: cells for name, cells in cases.items() if {one["kind"] for one in cells.values()} == {"identical"}
    }
    further = {name: cells for name, cells in cases.items() if name not in identical}
    lines = [f"{len(identical)} of {len(cases)} are identical. A case is named `GROUP/CASE`.", "", *_groups(identical)]
    return [*lines, "", "The others:", "", *_table(further)] if further else lines


def _table(cases: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| case | " + " | ".join(map(str, RANKS)) + " | note |", "|---" * (len(RANKS) + 2) + "|"]
    for name in sorted(cases):
        cells = cases[name]
        kinds = [cells[str(ranks)]["kind"] if str(ranks) in cells else "-" for ranks in RANKS]
        notes = dict.fromkeys(one["note"] for one in cells.values() if one["note"])
        lines.append(f"| {name} | {' | '.join(kinds)} | {'; '.join(notes)} |")
    return lines


def _groups(cases: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table with a row for the cases of a group that were run on the same numbers of ranks."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in sorted(cases):
        group, _, rest = name.partition("/")
        rows.setdefault((group, ", ".join(sorted(cases[name], key=int))), []).append(rest)
    lines = ["| group | ranks | cases |", "|---|---|---|"]
    return lines + [f"| {group} | {ranks} | {' · '.join(names)} |" for (group, ranks), names in rows.items()]


def cell(text: str) -> str:
    """Return a text that fits a cell."""
    short = " ".join(text.split())
    return (short if len(short) <= 300 else f"{short[:100]} ... {short[-200:]}").replace("|", "\\|")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
