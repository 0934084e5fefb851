"""The options of `runner rehearse`, with a job that only records what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from runner.chaos.run_under_test import JobUnderTest
from runner.cli.rehearse import rehearse
from runner.errors import UsageError
from runner.rehearse import disturbed_runs
from runner.rehearse.disturbed_runs import MOMENTS, Findings, Rehearsed
from runner.system import processes


class Jobs(list[dict[str, Any]]):
    """In place of `RehearsedJob`: what was asked for, and how every job behaves."""

    difference = ""

    def __call__(self, folder: Path, job: JobUnderTest, **details: Any) -> Jobs:
        self.append({"folder": folder, "script": list(job.program), **details})
        return self

    def rehearse(self, moments: list[Any]) -> Findings:
        self[-1]["moments"] = [moment.name for moment in moments]
        outcomes = [Rehearsed("undisturbed"), Rehearsed("again"), Rehearsed("killed", difference=self.difference)]
        return Findings(outcomes)


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(disturbed_runs, "RehearsedJob", made)
    monkeypatch.setattr(processes, "become_subreaper", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(rehearse, list(arguments))


def test_a_job_by_default(jobs: Jobs) -> None:
    result = run("--nproc-per-node", "2", "train.py", "--epochs", "3")
    assert result.exit_code == 0, result.output
    [asked] = jobs
    assert (asked["script"], asked["steps"], asked["limit_s"]) == (["train.py", "--epochs", "3"], 12, 1200)
    assert asked["moments"] == [moment.name for moment in MOMENTS if not moment.is_optional]
    assert "SAFE" in result.output and "2 ranks" in result.output
    assert not asked["folder"].exists()


def test_a_job_that_is_not_safe_ends_with_78_and_leaves_its_runs(jobs: Jobs, tmp_path: Path) -> None:
    jobs.difference = "step 3 differs: loss"
    result = run("--output-dir", str(tmp_path / "runs"), "train.py")
    assert result.exit_code == 78 and "step 3 differs: loss" in result.output
    assert f"the folders of all runs are in {tmp_path / 'runs'}" in result.output
    assert yaml.safe_load((tmp_path / "runs" / "job.yaml").read_text())


def test_all_moments_more_steps_and_json(jobs: Jobs) -> None:
    result = run("--all", "--steps", "30", "--json", "train.py")
    [asked] = jobs
    assert asked["steps"] == 30 and asked["moments"] == [moment.name for moment in MOMENTS]
    assert json.loads(result.stdout)["safe"] is True


def test_without_a_script_the_bundled_job_is_rehearsed(jobs: Jobs) -> None:
    result = run("--keep")
    assert "the bundled job" in result.output and jobs[0]["script"] == [] and jobs[0]["folder"].exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("missing.py",), "script 'missing.py' does not exist"),
        (("--output-dir", ".", "train.py"), "is not empty; choose another --output-dir"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(arguments: tuple[str, ...], text: str, jobs: Jobs) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UsageError) and text in str(result.exception) and not jobs


@pytest.mark.parametrize("arguments", [("--steps", "5"), ("--limit", "0")])
def test_too_few_steps_or_no_time_are_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments, "train.py").exit_code == 2
