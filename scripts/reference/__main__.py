"""Write the reference pages and the JSON schema of the configuration; `scripts/render-reference` runs it.

A new page is a module in this folder with a function `render() -> str`, and a line in FILES.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.reference import cli, configuration, events, exit_codes, failures, job_schema, metrics, python_api

ROOT = Path(__file__).resolve().parents[2]
# File → the function that returns its text.
FILES = {
    "docs/reference/cli.md": cli.render,
    "docs/reference/configuration.md": configuration.render,
    "docs/reference/events.md": events.render,
    "docs/reference/exit-codes.md": exit_codes.render,
    "docs/reference/failures.md": failures.render,
    "docs/reference/metrics.md": metrics.render,
    "docs/reference/python-api.md": python_api.render,
    "runner/config/job.schema.json": job_schema.render,
}


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("usage: scripts/render-reference [--check]")
    stale = False
    for name, render in FILES.items():
        path, text = ROOT / name, render()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale = True
        if check:
            print(f"render-reference: {name} is stale; run scripts/render-reference")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"render-reference: wrote {name}")
    sys.exit(1 if check and stale else 0)


main()
