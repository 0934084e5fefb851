"""Which runs are continued, by stand-ins for the trackers; integration/test_tracker_runs.py has the real ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from infra.parts import require

from checkpointing.manager.tracker_runs import (
    _WANDB_KEY,
    _WANDB_OWN,
    MLFLOW_TAG,
    ProgramRuns,
    continue_mlflow,
    continue_trackio,
    continue_wandb,
    held_in_files,
    wandb_rows,
)


class Refused(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


class Wandb:
    def __init__(self, *, lineage: str = "line") -> None:
        self.run: Any = None
        self.calls: list[dict[str, Any]] = []

        # As that of wandb, as far as it is looked at.
        def init(
            project: str = "",
            id: str | None = None,
            name: str | None = None,
            job_type: str | None = None,
            mode: str = "",
            resume: Any = None,
            resume_from: str | None = None,
            fork_from: str | None = None,
            settings: Any = None,
        ) -> Any:
            self.calls.append({"id": id, "resume": resume, "project": project})
            return SimpleNamespace(id=id, offline=False)

        self.init: Any = init
        continue_wandb(ProgramRuns(lineage), self)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, _, name in _WANDB_OWN + _WANDB_KEY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)


def test_names_are_the_same_in_every_attempt_and_differ_otherwise() -> None:
    first, again, other = ProgramRuns("line"), ProgramRuns("line"), ProgramRuns("other")
    names = [first.next_name("wandb"), first.next_name("wandb"), first.next_name("mlflow"), other.next_name("wandb")]
    assert len(set(names)) == 4 and all(name.isalnum() for name in names)
    assert [again.next_name("wandb"), again.next_name("wandb"), again.next_name("mlflow")] == names[:3]


def test_the_nth_run_of_wandb_is_that_of_the_attempt_before() -> None:
    attempts = [Wandb(), Wandb()]
    for attempt in attempts:
        attempt.init("mine")
        attempt.init(project="mine")
    assert attempts[0].calls == attempts[1].calls
    (first, second) = attempts[0].calls
    assert first["id"] and first["id"] != second["id"] and first["resume"] == second["resume"] == "allow"
    assert ProgramRuns.take(first["id"]) and not ProgramRuns.take(first["id"])


@pytest.mark.parametrize(
    "options",
    [{"id": "own"}, {"resume": "never"}, {"resume": True}, {"resume": False}, {"resume": "must"}, {"mode": "disabled"},
     {"fork_from": "a?_step=1"}, {"resume_from": "a?_step=1"}, {"settings": {"run_id": "own"}},
     {"settings": SimpleNamespace(run_id="own")}, {"settings": SimpleNamespace(resume="never")},
     {"settings": {"fork_from": "a?_step=1"}}],
)  # fmt: skip
def test_what_a_program_says_of_its_run_counts(options: dict[str, Any]) -> None:
    wandb = Wandb()
    wandb.init(**options)
    assert wandb.calls[0]["id"] == options.get("id") and wandb.calls[0]["resume"] == options.get("resume")


def test_an_attempt_that_skips_a_run_continues_its_own_ones() -> None:
    """The n-th run went by its number alone: training was appended to the run of a preparation that was skipped."""
    first, second = Wandb(), Wandb()
    first.init("mine", job_type="prepare")
    first.init("mine", settings={"run_name": "train"})
    first.init("mine", name="train")
    second.init("mine", name="train")
    second.init("mine", settings=SimpleNamespace(run_name="train"))
    second.init("other", name="train")
    ids = [call["id"] for call in first.calls + second.calls]
    assert ids[3:5] == ids[1:3] and len(set(ids)) == 4


@pytest.mark.parametrize("variable", [names[2] for names in _WANDB_KEY])
def test_the_environment_names_a_run_too(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Wandb(), Wandb()
    first.init()
    monkeypatch.setenv(variable, "x")
    second.init()
    assert first.calls[0]["id"] != second.calls[0]["id"]


@pytest.mark.parametrize("variable", [names[2] for names in _WANDB_OWN])
def test_what_the_environment_says_of_a_run_counts(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "x")
    wandb = Wandb()
    wandb.init()
    assert wandb.calls[0]["id"] is None


def test_a_run_that_is_open_stays_open() -> None:
    wandb = Wandb()
    wandb.run = SimpleNamespace(id="open")
    wandb.init()
    assert wandb.calls[0]["id"] is None


class Mlflow:
    """A server, by the tags of its runs, and one process."""

    def __init__(self, tags: dict[str, str]) -> None:
        self.tags, self.active, self.started = tags, None, list[Any]()
        self.exceptions = SimpleNamespace(MlflowException=Refused)
        self.tracking = SimpleNamespace(fluent=SimpleNamespace(_get_experiment_id=lambda: "0"))

        self.options = list[tuple[Any, ...]]()

        def start_run(
            run_id: str | None = None,
            experiment_id: Any = None,
            run_name: str | None = None,
            nested: bool = False,
            tags: Any = None,
            log_system_metrics: bool | None = None,
        ) -> Any:
            self.started.append(run_id)
            self.options.append((run_name, tags, log_system_metrics))
            if run_id is None:
                run_id = f"run-{len(self.tags)}"
                self.tags[(tags or {}).get(MLFLOW_TAG, run_id)] = run_id
            return run_id

        def log_params(params: dict[str, Any]) -> None:
            raise Refused("changing param values is not allowed\nmore")

        self.start_run: Any = start_run
        self.log_params: Any = log_params
        self.log_param: Any = log_params
        continue_mlflow(ProgramRuns("line"), self)

    def active_run(self) -> Any:
        return self.active

    def MlflowClient(self) -> Any:
        return self

    def search_runs(self, places: list[str], condition: str, max_results: int) -> list[Any]:
        assert places[0] in ("0", "7") and max_results == 1
        name = condition.partition("= '")[2].rstrip("'")
        return [SimpleNamespace(info=SimpleNamespace(run_id=self.tags[name]))] if name in self.tags else []


def test_the_nth_run_of_mlflow_is_that_of_the_attempt_before() -> None:
    tags: dict[str, str] = {}
    first, second = Mlflow(tags), Mlflow(tags)
    assert [first.start_run(), first.start_run(tags={"own": "1"})] == ["run-0", "run-1"]
    assert [second.start_run(), second.start_run(), second.start_run()] == ["run-0", "run-1", "run-2"]
    assert second.started == ["run-0", "run-1", None]


def test_a_run_of_mlflow_is_that_of_its_name_and_experiment() -> None:
    tags: dict[str, str] = {}
    first, second = Mlflow(tags), Mlflow(tags)
    first.start_run(run_name="prepare")
    first.start_run(run_name="train")
    first.start_run(experiment_id=7)
    second.start_run(None, "7")
    second.start_run(run_name="train", tags={"own": "1"}, log_system_metrics=True)
    assert second.started == ["run-2", "run-1"]
    # A run that continues has them, too.
    assert second.options[1] == ("train", {"own": "1"}, True)


def test_other_parameters_end_a_first_attempt_only(caplog: pytest.LogCaptureFixture) -> None:
    tags: dict[str, str] = {}
    first, second = Mlflow(tags), Mlflow(tags)
    first.start_run()
    with pytest.raises(Refused):
        first.log_params({"a": 1})
    second.start_run()
    second.log_params({"a": 2})
    assert caplog.messages == ["MLflow keeps the parameters of the first attempt: changing param values is not allowed"]


def test_a_server_that_fails_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: dict[str, str] = {}
    Mlflow(tags).start_run()
    second = Mlflow(tags)
    second.start_run()
    monkeypatch.setattr(Refused, "error_code", "INTERNAL_ERROR")
    with pytest.raises(Refused):
        second.log_params({"a": 2})


@pytest.mark.parametrize("options", [{"run_id": "own"}, {"nested": True}])
def test_a_run_of_mlflow_with_a_name_or_inside_another_is_left_alone(options: dict[str, Any]) -> None:
    tags: dict[str, str] = {}
    mlflow = Mlflow(tags)
    mlflow.start_run(**options)
    assert mlflow.started == [options.get("run_id")] and not set(tags) - {"run-0"}


def test_a_run_of_trackio_without_a_name_is_continued() -> None:
    calls: list[tuple[Any, Any]] = []

    def init(project: str, name: str | None = None, group: str | None = None, resume: str = "never") -> None:
        calls.append((name, resume))

    for _ in range(2):
        trackio: Any = SimpleNamespace(init=init)
        continue_trackio(ProgramRuns("line"), trackio)
        trackio.init("mine")
        trackio.init("mine", "own")
    assert calls[:2] == calls[2:] and calls[0][0] and calls[0][1] == "allow" and calls[1] == ("own", "never")
    trackio.init("other")
    trackio.init("mine", group="a")
    assert len({name for name, _ in calls}) == 4


def test_a_file_of_wandb_that_is_no_such_file_has_no_rows(tmp_path: Path) -> None:
    require("wandb")
    for content in (b"", b":W&B\xe1\xbe\x00", b":W&B\xe1\xbe\x00" + bytes(100), b"\xff" * 70_000):
        (tmp_path / "run.wandb").write_bytes(content)
        assert list(wandb_rows(tmp_path / "run.wandb")) == []


def test_a_first_attempt_has_no_files_of_others(tmp_path: Path) -> None:
    own = tmp_path / "offline-run-20260101_000000-a1" / "run-a1.wandb"
    own.parent.mkdir()
    own.touch()
    settings = SimpleNamespace(sync_file=str(own), wandb_dir=str(tmp_path))
    assert held_in_files(SimpleNamespace(id="a1", settings=settings)) == ({}, 0)
