"""Runs of experiment trackers that a program opens itself: the same run in every attempt.

Trackers begin another run whenever a process starts. The n-th run that a program opens in one place and under one name
is the n-th such run of the attempts before, whatever else an attempt opens or skips. What a program identifies or
resumes itself, by an argument, settings or a variable of the environment, is left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

logger = logging.getLogger("checkpointing")

# The x-axis that the Trainer gives wandb and trackio.
STEP = "train/global_step"
MLFLOW_TAG = "resilient.run"
_ID_LENGTH = 16
# What says which run is meant, by the argument of `wandb.init`, its field of `wandb.Settings`, and its variable.
_WANDB_OWN = (
    ("id", "run_id", "WANDB_RUN_ID"),
    ("resume", "resume", "WANDB_RESUME"),
    ("fork_from", "fork_from", "WANDB_FORK_FROM"),
    ("resume_from", "resume_from", "WANDB_RESUME_FROM"),
    ("sweep_id", "sweep_id", "WANDB_SWEEP_ID"),
)
_WANDB_KEY = (
    ("project", "project", "WANDB_PROJECT"),
    ("entity", "entity", "WANDB_ENTITY"),
    ("name", "run_name", "WANDB_NAME"),
    ("group", "run_group", "WANDB_RUN_GROUP"),
    ("job_type", "run_job_type", "WANDB_JOB_TYPE"),
)

# Steps by name. All of them, not the newest: some trackers write out of order, and a killed process leaves gaps.
Held = dict[str, Collection[int]]


class ProgramRuns:
    """The runs that a program opens in one process.

    Args:
        lineage: A supervisor's name of the run, the same in every attempt.
    """

    # Runs that have been opened here, which a Trainer has not taken up yet.
    _to_continue: ClassVar[set[str]] = set()

    def __init__(self, lineage: str) -> None:
        self._lineage, self._numbers = lineage, Counter[str]()

    def next_name(self, tracker: str, *key: object) -> str:
        """Return the name of the next run that the program opens of a tracker, under what it calls this run itself."""
        kind = json.dumps([self._lineage, tracker, *key], default=str)
        self._numbers[kind] += 1
        text = f"{kind}/{self._numbers[kind]}"
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]

    @classmethod
    def add(cls, run: str) -> None:
        """Note that a run may have entries of earlier attempts."""
        cls._to_continue.add(run)

    @classmethod
    def take(cls, run: str) -> bool:
        """Return whether the entries of a run may be those of a Trainer in an earlier attempt.

        That holds for the first Trainer of a process alone: steps of a second one have the same numbers.
        """
        found = run in cls._to_continue
        cls._to_continue.discard(run)
        return found


def continue_wandb(runs: ProgramRuns, wandb: Any) -> None:
    """Have `wandb.init` continue the run of the attempts before."""
    original: Callable[..., Any] = wandb.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        is_own = any(_said(given, *names) is not None for names in _WANDB_OWN) or given.get("mode") == "disabled"
        if is_own or wandb.run is not None:
            return original(*args, **kwargs)
        name = runs.next_name("wandb", *(_said(given, *names) for names in _WANDB_KEY))
        run = original(*args, **{**kwargs, "id": name, "resume": "allow"})
        runs.add(run.id)
        if run.offline:
            skip_rows(run, held_in_files(run)[1])
        return run

    wandb.init = init


def _said(given: Mapping[str, Any], argument: str, field: str, variable: str) -> Any:
    """Return what a program says by an argument of `wandb.init`, its settings or the environment, or None."""
    settings = given.get("settings")
    of_settings = settings.get(field) if isinstance(settings, Mapping) else getattr(settings, field, None)
    return next(
        (one for one in (given.get(argument), of_settings) if one is not None), os.environ.get(variable) or None
    )


def continue_mlflow(runs: ProgramRuns, mlflow: Any) -> None:
    """Have `mlflow.start_run` continue the run of the attempts before, and bear other parameters there."""
    original: Callable[..., Any] = mlflow.start_run

    @functools.wraps(original)
    def start_run(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        is_named = given.get("run_id") or os.environ.get("MLFLOW_RUN_ID")
        if is_named or given.get("nested") or given.get("parent_run_id") or mlflow.active_run() is not None:
            return original(*args, **kwargs)
        place = str(given.get("experiment_id") or mlflow.tracking.fluent._get_experiment_id())
        name = runs.next_name("mlflow", place, given.get("run_name"))
        found = find_mlflow_run(mlflow, name, place)
        if found is None:
            return original(*args, **{**kwargs, "tags": {**(given.get("tags") or {}), MLFLOW_TAG: name}})
        runs.add(found)
        for one in ("log_param", "log_params"):
            setattr(mlflow, one, _without_refusals(getattr(mlflow, one), mlflow.exceptions.MlflowException))
        # With its name, tags and system metrics, which count for a run that continues, too.
        return original(**{**given, "run_id": found})

    mlflow.start_run = start_run


def continue_trackio(runs: ProgramRuns, trackio: Any) -> None:
    """Have `trackio.init` without a name continue the run of the attempts before."""
    original: Callable[..., Any] = trackio.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        if given.get("name") is not None or given.get("resume", "never") == "must":
            return original(*args, **kwargs)
        name = runs.next_name("trackio", given.get("project"), given.get("group"))
        return original(*args, **{**kwargs, "name": name, "resume": "allow"})

    trackio.init = init


CONTINUED: dict[str, Callable[[ProgramRuns, Any], None]] = {
    "wandb": continue_wandb,
    "mlflow": continue_mlflow,
    "trackio": continue_trackio,
}


def find_mlflow_run(mlflow: Any, name: str, experiment: str | None = None) -> str | None:
    """Return the id of the run that was opened under a name in an experiment, by default the current one."""
    place = experiment or mlflow.tracking.fluent._get_experiment_id()
    found = mlflow.MlflowClient().search_runs([place], f"tags.`{MLFLOW_TAG}` = '{name}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def _without_refusals(log: Callable[..., Any], refusal: type[Exception]) -> Callable[..., Any]:
    """Return a call of MLflow that does not end a resumed program because a parameter has another value now."""

    @functools.wraps(log)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return log(*args, **kwargs)
        except refusal as error:
            if getattr(error, "error_code", "") != "INVALID_PARAMETER_VALUE":
                raise
            logger.warning("MLflow keeps the parameters of the first attempt: %s", str(error).partition("\n")[0])
            return None

    return call


def note_steps(held: dict[str, set[int]], row: dict[str, Any]) -> None:
    """Add the names of an entry, which has the Trainer's step unless the script itself has logged it."""
    if STEP in row:
        for name in row:
            held.setdefault(name, set()).add(int(row[STEP]))


def held_in_files(run: Any) -> tuple[Held, int]:
    """Return what earlier attempts have written of an offline wandb run: steps by name, and the number of rows."""
    held: dict[str, set[int]] = {}
    rows, besides = 0, Path(run.settings.sync_file)
    for path in sorted(Path(run.settings.wandb_dir).glob(f"*run-*-{run.id}/run-{run.id}.wandb")):
        if path.samefile(besides):
            continue
        for row in wandb_rows(path):
            note_steps(held, row)
            rows = max(rows, int(row.get("_step", -1)) + 1)
    return dict(held), rows


def skip_rows(run: Any, rows: int) -> None:
    """Have an offline wandb run count its rows from `rows` on; by itself it would begin with 0 again."""
    if rows > run.step:
        run.log({}, step=rows, commit=False)


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the history in a wandb file, up to where the process was killed.

    The file is a header of 7 bytes and LevelDB's log format around protobuf records, see
    https://github.com/google/leveldb/blob/main/doc/log_format.md.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        if kind not in (1, 2, 3, 4) or len(part) < length:
            return
        at += 7 + length
        # Whole, first, middle, last.
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            if record.HasField("history"):
                row = {}
                for item in record.history.item:
                    with contextlib.suppress(ValueError):
                        row["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
                yield row
