"""Runs frameworks without us, with us, and killed: python -m frameworks [--write FILE] [--ranks N] [NAME ...]

Each framework is installed once into an environment of its own. The three runs must end with the same tensors in the
last checkpoint, and with the same logged figures. Exits with 1 where they do not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameworks.table import FRAMEWORKS, STEPS, Framework

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ENVIRONMENTS = Path(os.environ.get("FRAMEWORKS_VENV", ROOT / ".venv-frameworks"))
_LIMIT_S = 900
# Of a logged line: what depends on the clock, on the machine, or on where it stands.
_TIMED = re.compile(r"time|second|runtime|speed|remaining|memory|percentage")
_BEGIN, _END = "<!-- The table begins. scripts/frameworks writes it. -->", "<!-- The table ends. -->"


@dataclass
class Verdict:
    """What became of one framework on a number of ranks."""

    framework: str
    version: str
    ranks: int
    differs: list[str] = field(default_factory=list)
    kills: int = 0
    day: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.differs


def python_of(framework: Framework) -> Path:
    """Return the interpreter of a framework's environment, which is made if it is not there."""
    if not framework.environment:
        return Path(sys.executable)
    folder, requirements = ENVIRONMENTS / framework.environment, HERE / "requirements" / f"{framework.environment}.txt"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = requirements.read_text() + (ROOT / "pyproject.toml").read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {requirements.name} into {folder} (once; some minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--requirement", str(requirements), "--editable", f"{ROOT}[runner]"], check=True)
    for name in re.findall(r"^# without: (\S+)", requirements.read_text(), re.MULTILINE):
        # Builds for CUDA cannot be loaded next to torch's build for the CPU; an empty module stands in where it is
        # imported, and nothing of it is used.
        subprocess.run([*pip, "uninstall", "--yes", name], check=True)
    for name in re.findall(r"^# empty: (\S+)", requirements.read_text(), re.MULTILINE):
        [place] = folder.glob("lib/python*/site-packages")
        (place / name).mkdir(exist_ok=True)
        (place / name / "__init__.py").touch()
    stamp.write_text(wanted)
    return python


class Trial:
    """A framework on a number of ranks, in a folder of its own."""

    def __init__(self, framework: Framework, ranks: int, folder: Path, data: Path) -> None:
        self._framework, self._ranks, self._folder, self._data = framework, ranks, folder, data
        self._python = python_of(framework)

    def run(self, seed: int) -> Verdict:
        """Run it without us, with us, and killed."""
        framework = self._framework
        asked = f"import importlib.metadata; print(importlib.metadata.version({framework.package!r}))"
        version = subprocess.run([self._python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
        verdict = Verdict(framework.name, version, self._ranks, day=datetime.datetime.now().date().isoformat())
        stock = self._start("stock", framework.stock, framework.further, framework.variables)
        if not stock:
            verdict.differs.append("the stock command fails")
            return verdict
        draw, fired = random.Random(f"{seed}/{framework.name}/{self._ranks}"), self._folder / "fired"
        fired.mkdir()
        # Each counts the steps of its own process.
        steps = draw.sample(range(2, 8), 3)
        armed = {
            "CHECKPOINT_FAILPOINTS": framework.killed or f"training.step=kill@{','.join(map(str, steps))}",
            "CHECKPOINT_FAILPOINTS_ONCE": str(fired),
        }
        for name, variables in (("ours", {}), ("killed", armed)):
            runner = (str(self._python.parent / "runner"), "start", "--output-dir", "{out}-run")
            if not self._start(name, (*runner, "--nproc-per-node", "{ranks}"), (), variables):
                verdict.differs.append(f"{name}: fails")
                continue
            verdict.differs += [f"{name}: {text}" for text in self._differences(name)]
        verdict.kills = len(list(fired.iterdir()))
        return verdict

    def _start(self, name: str, before: Sequence[str], after: Sequence[str], variables: Mapping[str, str]) -> bool:
        folder = self._folder / name
        folder.mkdir()
        names = {
            "data": str(self._data),
            "out": str(folder / "out"),
            "programs": str(HERE / "programs"),
            "ranks": str(self._ranks),
        }
        for file, text in self._framework.files.items():
            (folder / file).write_text(text.format(**names))
        command = (name == "stock" and self._framework.stock_command) or self._framework.command
        words = [word.format(**names) for word in (*before, *command, *after)]
        if words[0].endswith(".py"):
            words.insert(0, str(self._python))
        environment = {
            **os.environ,
            "PATH": f"{self._python.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # LLaMA-Factory's own: it knows the versions of the day of its release.
            "DISABLE_VERSION_CHECK": "1",
            "DO_NOT_TRACK": "1",
            "AXOLOTL_DO_NOT_TRACK": "1",
            **{key: value.format(**names) for key, value in variables.items()},
        }
        environment.pop("PYTHONPATH", None)
        with (folder / "console").open("wb") as console:
            try:
                done = subprocess.run(
                    words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=console,
                    stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return False
        return done.returncode == 0

    def _differences(self, name: str) -> list[str]:
        """Compare the last checkpoint, what the program itself has written at its end, and the log."""
        stock, ours = self._folder / "stock" / "out", self._folder / name / "out"
        theirs = _tensors(self._python, _last(stock), stock)
        mine = _tensors(self._python, _last(Path(f"{ours}-run") / "checkpoints"), ours)
        found = [f"{key} differs" for key in sorted(theirs.keys() & mine.keys()) if theirs[key] != mine[key]]
        if not theirs.keys() & mine.keys():
            found.append("nothing can be compared")
        found += [f"{key} is missing" for key in sorted(theirs.keys() - mine.keys())]
        logs = [_figures(folder) for folder in (stock, ours)]
        return found[:3] + ([] if logs[0] == logs[1] else ["the log differs"])


def _last(folder: Path) -> Path:
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return found[-1] if found else folder / "none"


_READ = """
import glob, hashlib, json, os, sys, torch
found = {}
def flat(value, name=""):
    for key, one in value.items() if isinstance(value, dict) else ():
        yield from flat(one, f"{name}.{key}")
    if isinstance(value, torch.Tensor):
        yield name, value
for kind, folder in (("checkpoint", sys.argv[1]), ("result", sys.argv[2])):
    pattern = "**/*" if kind == "checkpoint" else "*"
    own = glob.glob(f"{folder}/checkpoint/step-*/.metadata")
    own.sort(key=lambda path: int(path.split("-")[-1].split("/")[0]))
    for path in [
        *glob.glob(f"{folder}/{pattern}", recursive=True), *glob.glob(f"{folder}/final/**/*", recursive=True), *own[-1:]
    ]:
        name = f"{kind} {os.path.relpath(path, folder)}"
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file
            tensors = load_file(path)
        elif os.path.basename(path) in ("final.pt",):
            tensors = torch.load(path)
        elif os.path.basename(path) == ".metadata":
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
            dcp_to_torch_save(os.path.dirname(path), "whole.pt")
            whole = torch.load("whole.pt", weights_only=False)
            tensors = dict(flat(whole))
        else:
            continue
        state = hashlib.sha256()
        for key in sorted(tensors):
            state.update(key.encode() + str(tensors[key].dtype).encode())
            state.update(tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found[name] = state.hexdigest()
print(json.dumps(found))
"""


def _tensors(python: Path, checkpoint: Path, result: Path) -> dict[str, str]:
    """Return digests of the tensors in a checkpoint and a result: how a file is laid out does not matter."""
    command = [str(python), "-W", "ignore", "-c", _READ, str(checkpoint), str(result)]
    done = subprocess.run(command, cwd=result.parent, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _figures(folder: Path) -> list[dict[str, Any]]:
    """Return the figures that were logged, by what the framework or the Trainer has written; each step once."""
    for name in ("trainer_log.jsonl", "logging.jsonl"):
        if (folder / name).exists():
            lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            kept = [{key: value for key, value in line.items() if not _TIMED.search(key)} for line in lines]
            return [line for line in kept if "loss" in line]
    state = folder / "trainer_state.json"
    entries = json.loads(state.read_text())["log_history"] if state.exists() else []
    return [
        {key: value for key, value in entry.items() if not _TIMED.search(key)} for entry in entries if "loss" in entry
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/frameworks", description="Run frameworks without us, with us, and killed."
    )
    parser.add_argument("names", nargs="*", help="Regular expressions; frameworks whose names match any of them.")
    parser.add_argument("--write", type=Path, help="Markdown file of the table, to which this run is added.")
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], help="Numbers of ranks.")
    parser.add_argument("--seed", type=int, default=1, help="Of the steps at which ranks are killed.")
    parser.add_argument("--keep", type=Path, help="Folder for the runs; default: a temporary one.")
    options = parser.parse_args()
    wanted = [one for one in FRAMEWORKS if not options.names or any(re.search(p, one.name) for p in options.names)]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="frameworks-") as temporary:
        place = options.keep or Path(temporary)
        data = place / "data"
        if not data.exists():
            data.mkdir(parents=True)
            subprocess.run([sys.executable, HERE / "small_model.py", data], check=True, capture_output=True)
        for framework in wanted:
            for ranks in options.ranks or framework.ranks:
                folder = place / f"{re.sub(r'[^a-z0-9]+', '-', framework.name.lower())}-{ranks}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                verdict = Trial(framework, ranks, folder, data).run(options.seed)
                failed += not verdict.is_equal
                text = "; ".join(verdict.differs) or f"equal, killed {verdict.kills} times"
                print(f"{framework.name} {verdict.version}, {ranks} ranks: {text}", flush=True)
                if options.write:
                    add(options.write, verdict)
    return 1 if failed else 0


# -- the page --------------------------------------------------------------------------------------------------------


def add(page: Path, verdict: Verdict) -> None:
    """Add a verdict to the results, and write the table of the page from them."""
    record = HERE / "results.json"
    results = json.loads(record.read_text()) if record.exists() else {}
    results[f"{verdict.framework}/{verdict.ranks}"] = vars(verdict)
    record.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n\n{table(results)}\n\n{_END}{rest.partition(_END)[2]}")


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table: a row for each framework, a cell for each number of ranks that was run."""
    lines = [
        "| framework | version | command after `runner start` | 1 rank | 2 ranks | 3 ranks |",
        "|---|---|---|---|---|---|",
    ]
    for framework in FRAMEWORKS:
        cells = [results.get(f"{framework.name}/{ranks}") for ranks in (1, 2, 3)]
        known = [cell for cell in cells if cell is not None]
        version = ", ".join(sorted({cell["version"] for cell in known})) or "-"
        shown = framework.shown or " ".join(framework.command)
        texts = ["not run" if cell is None else _cell(cell) for cell in cells]
        lines.append(f"| {framework.name} | {version} | `{shown}` | {' | '.join(texts)} |")
    days = sorted({str(cell["day"]) for cell in results.values()})
    lines += ["", f"{STEPS} steps on a CPU, run {' and '.join(days[:: max(len(days) - 1, 1)])}."]
    return "\n".join(lines)


def _cell(verdict: Mapping[str, Any]) -> str:
    if verdict["differs"]:
        return str(verdict["differs"][0])
    return f"equal; {verdict['kills']} kills"


if __name__ == "__main__":
    sys.exit(main())
