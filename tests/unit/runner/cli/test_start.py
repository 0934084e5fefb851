"""The options of `runner init` and `runner start`; what they lead to is in tests/unit/runner/test_boot.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from runner.cli.main import cli
from runner.cli.start import resume_step
from runner.config.load import load_config
from runner.config.schema import JOB_SCHEMA
from runner.errors import UsageError


@pytest.mark.parametrize(("text", "step"), [("auto", "auto"), ("never", "never"), ("0", 0), ("120", 120)])
def test_what_to_resume_from(text: str, step: str | int) -> None:
    assert resume_step(text) == step


@pytest.mark.parametrize("text", ["", "-1", "newest", "1.5", "٣"])
def test_what_is_no_checkpoint_to_resume_from(text: str) -> None:
    with pytest.raises(UsageError, match="use auto, never, or the number"):
        resume_step(text)


def init(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["init", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_it_writes_a_job_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert init() == "runner: wrote job.yaml; start the run with: runner start --config job.yaml\n"
    assert load_config("job.yaml", {}).output_dir == "runs/job"


def test_it_overwrites_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text("output_dir: x\n")
    with pytest.raises(UsageError, match=r"mine\.yml exists; pass --force to overwrite it"):
        init(str(path))
    assert path.read_text() == "output_dir: x\n"
    init(str(path), "--force")
    text = path.read_text()
    assert "# output_dir: runs/mine\n" in text and "runner start --config mine.yml\n" in text


def test_the_schema_is_named_by_a_path_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def schema_of(path: Path) -> Path:
        init(str(path), "--force")
        return Path(path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema="))

    assert schema_of(tmp_path / "job.yaml") == JOB_SCHEMA
    installed = tmp_path / ".venv" / "lib" / "job.schema.json"
    monkeypatch.setattr("runner.config.schema.JOB_SCHEMA", installed)
    assert schema_of(tmp_path / "job.yaml") == Path(".venv/lib/job.schema.json")
