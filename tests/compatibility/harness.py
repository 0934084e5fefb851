"""Runs the cases of the table on a fork server and judges them. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compatibility.table import Case, Verdict

_START_TIMEOUT_S = 120.0
_TESTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: "identical", "differs", "refused", "crash", "hang" or "skipped".
        note: which part differs first, the refusal's text, or the end of the traceback.
        at_resume: whether it was refused only after a restart.
        log: what rank 0 has printed.
    """

    kind: str
    note: str = ""
    at_resume: bool = False
    log: str = field(default="", repr=False)
    seconds: float = 0.0

    def matches(self, verdict: Verdict) -> bool:
        if self.kind == "skipped":
            return True
        if self.kind != verdict.kind:
            return False
        if verdict.kind == "refused":
            return re.search(verdict.detail, self.note) is not None and self.at_resume == verdict.at_resume
        if re.search(verdict.part, self.note) is None:
            return False
        return verdict.warning is None or re.search(verdict.warning, self.log) is not None


@dataclass
class Ended:
    """One start of a case, and the results of its ranks."""

    folder: Path
    ranks: int
    statuses: dict[str, int]
    hung: bool

    def document(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"result-{rank}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @property
    def log(self) -> str:
        path = self.folder / "log-0.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def trouble(self) -> Outcome | None:
        """Return the failure; None if all ranks reached their end."""
        if self.hung:
            return Outcome("hang", f"no end within the time; {self.log[-300:]}")
        found = [self.document(rank) for rank in range(self.ranks)]
        failed = [document for document in found if "error" in document]
        # A rank whose peer has died fails in a collective; the cause is in the other one.
        failed.sort(key=lambda one: (not one["refused"], not one["mismatch"], "Connection" in one["error"]))
        for document in failed[:1]:
            if document["refused"]:
                return Outcome("refused", document["error"])
            if document["mismatch"]:
                return Outcome("differs", document["error"])
            return Outcome("crash", f"{document['error']}\n{document['traceback']}")
        if not all("result" in document for document in found):
            return Outcome("crash", f"the ranks ended with {self.statuses}; {self.log[-300:]}")
        return None

    def results(self) -> dict[str, str]:
        return {f"{key} (rank {rank})": value for rank in range(self.ranks) for key, value in self._result(rank)}

    def _result(self, rank: int) -> list[tuple[str, str]]:
        return list(self.document(rank)["result"].items())

    def seen(self) -> tuple[dict[str, list[str]], dict[int, int]]:
        """Return what the steps worked on, by stage, step, kind and rank; and the first step of each attempt.

        A recomputed step counts as the last attempt saw it.
        """
        by_attempt: dict[tuple[str, int], list[str]] = {}
        newest: dict[str, int] = {}
        first: dict[int, int] = {}
        for rank in range(self.ranks):
            path = self.folder / f"seen-{rank}.jsonl"
            for line in path.read_text().splitlines() if path.exists() else ():
                attempt, stage, step, kind, value = json.loads(line)
                if kind == "begin":
                    first.setdefault(attempt, step)
                    continue
                key = f"{kind} of stage {stage}, step {step:04d} (rank {rank})"
                by_attempt.setdefault((key, attempt), []).append(value)
                newest[key] = attempt
        return {key: by_attempt[key, newest[key]] for key in sorted(newest)}, first


# What a resumed run says where its step record differs.
_REPORTED = re.compile(r"step \d+ differs \(rank \d+\): [^.]*")


class ForkServer:
    """Starts the server; `judge` runs cases on it. May be used by several threads."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="compat-"))
        self._socket = self._folder / "server.sock"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RANK", "CHECKPOINT_"))},
            "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent)]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self._folder / "hf"),
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),
            "PYTHONWARNINGS": "ignore",
        }
        log = (self._folder / "server.txt").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "compatibility.server", str(self._socket)],
            env=environment,
            cwd=_TESTS.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        until = time.monotonic() + _START_TIMEOUT_S
        while not self._socket.exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                raise RuntimeError(
                    f"the fork server did not start: {(self._folder / 'server.txt').read_text()[-3000:]}"
                )
            time.sleep(0.05)
        self.cases = {one["name"]: _parsed(one) for one in self._ask({"cases": True})}

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def judge(self, name: str, keep: Path | None = None, ranks: int | None = None) -> Outcome:
        """Run a case in all its variants and compare them.

        Args:
            keep: a folder for the logs and results of its runs.
            ranks: number of ranks; by default the case's own.
        """
        case, missing = self.cases[name]
        if ranks is not None:
            # They share this machine's cores.
            slower = max(1.0, ranks / case.ranks)
            case = dataclasses.replace(case, ranks=ranks, timeout_s=case.timeout_s * slower)
        if missing:
            return Outcome("skipped", f"not installed: {', '.join(missing)}")
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="", dir=self._folder))
        try:
            outcome = self._judge(case, folder)
        finally:
            if keep is not None:
                shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "tmp"))
            shutil.rmtree(folder, ignore_errors=True)
        logs = outcome.log
        # The folder's name changes each time, and the table is under version control.
        note = re.sub(rf"{re.escape(str(folder))}/\w", "/run", outcome.note)
        return Outcome(outcome.kind, note, outcome.at_resume, logs, time.monotonic() - began)

    def _judge(self, case: Case, folder: Path) -> Outcome:
        # A failure without `resilient`, too, is a defect of the case or of the library.
        stock = self._start(case, "stock", folder / "s") if case.stock else None
        trouble = stock.trouble() if stock is not None else None
        if stock is not None and trouble is not None:
            return Outcome(trouble.kind, f"without resilient: {trouble.note}", log=stock.log)
        undisturbed = self._start(case, "undisturbed", folder / "u")
        trouble = undisturbed.trouble()
        if trouble is not None:
            return Outcome(trouble.kind, trouble.note, log=undisturbed.log)
        if case.twice:
            again = self._start(case, "undisturbed", folder / "v")
            difference = _first_difference(undisturbed.results(), again.results()) or _first_difference(
                undisturbed.seen()[0], again.seen()[0]
            )
            if (trouble := again.trouble()) is not None or difference is not None:
                return trouble or Outcome("differs", f"between two undisturbed runs: {difference}", log=again.log)
        changed = None
        if stock is not None:
            changed = _first_difference(stock.seen()[0], undisturbed.seen()[0]) or _first_difference(
                _parameters(stock), _parameters(undisturbed)
            )
        for attempt, (kill, saved) in enumerate(
            zip((*case.kills, None), (*case.saved[: len(case.kills)], 0), strict=True)
        ):
            killed = self._start(case, "killed", folder / "k", attempt=attempt, kill=kill, saved=saved)
            trouble = killed.trouble()
            if kill is not None and all(status == -9 for status in killed.statuses.values()) and not killed.hung:
                continue
            if trouble is not None:
                when = f"restart {attempt}: " if attempt else "before the kill: "
                return Outcome(trouble.kind, when + trouble.note, at_resume=attempt > 0, log=killed.log)
        log = undisturbed.log + killed.log
        difference = _after_kills(case, undisturbed, killed)
        notes = {"changed by resilient": changed, "after the kill": difference}
        if difference is None and (alarm := _REPORTED.search(killed.log)) is not None:
            notes["the step record, wrongly"] = alarm[0]
        note = "; ".join(f"{when}: {what}" for when, what in notes.items() if what)
        return Outcome("differs" if note else "identical", note, log=log)

    def _start(
        self,
        case: Case,
        variant: str,
        folder: Path,
        *,
        attempt: int = 0,
        kill: tuple[int, int] | None = None,
        saved: int = 0,
    ) -> Ended:
        for path in folder.glob("result-*.json"):
            path.unlink()
        order = {
            "case": case.name,
            "variant": variant,
            "folder": str(folder),
            "attempt": attempt,
            "kill": kill,
            "saved": saved,
            "ranks": case.ranks,
            "timeout_s": case.timeout_s,
        }
        answer = self._ask(order)
        return Ended(folder, case.ranks, answer["statuses"], answer["hung"])

    def _ask(self, request: dict[str, Any]) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                return json.loads(stream.readline())


def _parsed(described: dict[str, Any]) -> tuple[Case, list[str]]:
    """A case as this process knows it, without its body; and the packages it misses."""
    missing = described.pop("missing")
    kills = tuple((stage, step) for stage, step in described.pop("kills"))
    saved, verdict = tuple(described.pop("saved")), Verdict(**described.pop("verdict"))
    return Case(**described, body=_no_body, kills=kills, saved=saved, verdict=verdict), missing


def _no_body(run: object) -> None:
    raise NotImplementedError("cases run on the fork server")


def _after_kills(case: Case, undisturbed: Ended, killed: Ended) -> str | None:
    seen, first = killed.seen()
    for attempt, saved in enumerate(case.saved, 1):
        if saved and first.get(attempt) == 0:
            return f"restart {attempt} began at step 0, not from the checkpoint of step {saved}"
    return _first_difference(undisturbed.seen()[0], seen) or _first_difference(undisturbed.results(), killed.results())


def _parameters(ended: Ended) -> dict[str, str]:
    return {name: value for name, value in ended.results().items() if "parameters/" in name}


def _first_difference(left: dict[str, Any], right: dict[str, Any]) -> str | None:
    """What differs, the first of it by name; None where both are equal."""
    names = [name for name in [*left, *(right.keys() - left.keys())] if left.get(name) != right.get(name)]
    if not names:
        return None
    first = names[0]
    how = "missing after" if first not in right else "not there before" if first not in left else "differs"
    return f"{first} {how}" + (f" ({len(names)} of {len(left)} parts)" if len(names) > 1 else "")


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
