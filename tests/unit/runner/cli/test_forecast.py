"""The options of `runner doctor`, `plan` and `simulate`, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import runner.doctor
from runner.cli.forecast import doctor, plan, simulate
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.errors import UsageError
from runner.plan import plan as plan_module
from runner.plan.plan import Assumptions
from runner.plan.simulate.scenario import GPU_MTTF_S, HOUR_S
from runner.session.preflight import StartRequest


def run(command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def refused(command: Any, *arguments: str) -> str:
    result = run(command, *arguments)
    assert isinstance(result.exception, UsageError), result
    return str(result.exception)


# -- doctor --------------------------------------------------------------------------------------------------------

GOOD, SLOW, BAD = ok("GPUs", "8 x H100"), warn("disk", "slow", "use NVMe"), fail("port", "in use", "choose another")


@pytest.mark.parametrize(
    ("findings", "code", "counts"),
    [
        ([GOOD, SLOW], 0, "2 checks, 0 failed, 1 warnings"),
        ([BAD, GOOD, SLOW], 1, "3 checks, 1 failed, 1 warnings"),
    ],
)
def test_a_failed_check_fails_the_command(
    findings: list[Finding], code: int, counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.doctor, "examine", lambda *_, **__: iter(findings))
    result = run(doctor)
    assert result.exit_code == code and counts in result.output
    assert "warn  disk: slow\n      use NVMe" in result.output
    listed = run(doctor, "--json")
    assert listed.exit_code == code
    assert json.loads(listed.output)[0] == {**vars(findings[0]), "level": findings[0].level.value}


def test_the_doctor_examines_the_configured_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = examined(monkeypatch)
    assert run(doctor, "--nproc-per-node", "4", "--set", "trainer.max_length=64").exit_code == 0
    asked, nested, _ = seen[0]
    assert asked.config.launch.nproc_per_node == 4 and asked.config.trainer["max_length"] == 64
    assert (nested, asked.job.program, asked.step) == (None, None, "auto")


def test_the_doctor_takes_a_command_line_as_start_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    seen = examined(monkeypatch)
    own = ["--json", "--try-imports", "--resume", "7", "--metrics-port", "9", "--allow-changes"]
    assert run(doctor, *own, "torchrun", "--nproc-per-node", "3", str(script), "--json").exit_code == 0
    asked, nested, try_imports = seen[0]
    assert asked.job.program == nested.program and nested.program.args == ("--json",)
    assert (asked.step, asked.job.allow_changes, asked.config.monitoring.port) == (7, True, 9)
    assert try_imports and asked.config.launch.nproc_per_node == 3
    assert [said for _, _, said in nested.settings] == ["--nproc_per_node 3"]
    assert "does not exist" in refused(doctor, "missing.py")
    script.write_text("def (")
    assert "Python cannot compile" in refused(doctor, str(script))


def test_a_stopped_doctor_removes_what_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    removed, before = [], signal.getsignal(signal.SIGTERM)

    def examine(*_: object, **__: object) -> Iterator[Finding]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield GOOD
        finally:
            removed.append("trial")

    monkeypatch.setattr(runner.doctor, "examine", examine)
    assert run(doctor).exit_code == 128 + signal.SIGTERM and removed == ["trial"]
    assert signal.getsignal(signal.SIGTERM) == before


def examined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StartRequest, Any, bool]]:
    """Have nothing examined, but what was asked for recorded."""
    seen: list[tuple[StartRequest, Any, bool]] = []

    def examine(asked: StartRequest, nested: Any, *, try_imports: bool) -> list[Finding]:
        seen.append((asked, nested, try_imports))
        return []

    monkeypatch.setattr(runner.doctor, "examine", examine)
    return seen


# -- plan ----------------------------------------------------------------------------------------------------------


class Plans(list[tuple[Config, Assumptions]]):
    """In place of `make_plan`."""

    def __call__(self, config: Config, given: Assumptions, **_: object) -> Plans:
        self.append((config, given))
        return self

    def to_dict(self) -> dict[str, str]:
        return {"chosen": "full, DDP"}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    made = Plans()
    monkeypatch.setattr(plan_module, "make_plan", made)
    monkeypatch.setattr(plan_module, "render", lambda plan: "the page")
    return made


def test_what_is_not_given_is_measured(plans: Plans) -> None:
    assert "the page" in run(plan).output
    assert json.loads(run(plan, "--json").output) == {"chosen": "full, DDP"}
    assert [given for _, given in plans] == [Assumptions()] * 2


def test_sizes_and_rates_have_units(plans: Plans) -> None:
    options = ["--gpus", "8", "--gpu-memory", "80GiB", "--copy-rate", "20GB", "--step-seconds", "0.5"]
    assert run(plan, *options, "--mttf-hours", "12", "--reclaims-per-day", "0", "--work-hours", "5").exit_code == 0
    assert plans[0][1] == Assumptions(8, 80 << 30, 0.5, 5.0, 12.0, 0.0, 20 * 10**9)
    assert "--gpu-memory" in refused(plan, "--gpu-memory", "much")
    assert run(plan, "--mttf-hours", "0").exit_code == 2


def test_the_former_name_of_nnodes_is_accepted(plans: Plans) -> None:
    assert run(plan, "--machines", "3", "--rdzv-endpoint", "host:29500").exit_code == 0
    assert plans[0][0].launch.nnodes == 3


# -- simulate ------------------------------------------------------------------------------------------------------


def parameters(*options: str) -> dict[str, float]:
    result = run(simulate, *options, "--list")
    assert result.exit_code == 0, result
    return {name: float(value) for name, value in (line.split("=") for line in result.output.splitlines())}


def test_failures_by_the_number_of_gpus() -> None:
    assert parameters("--gpus", "1024")["mttf_s"] == pytest.approx(GPU_MTTF_S / 1024, rel=1e-4)
    assert parameters("--mttf-hours", "2")["mttf_s"] == 2 * HOUR_S


def test_parameters_are_overridden_by_name() -> None:
    found = parameters("--work-hours", "3", "--set", "commit_s=7", "--reclaims-per-day", "24")
    assert (found["work_s"], found["commit_s"], found["reclaim_s"]) == (3 * HOUR_S, 7, HOUR_S)
    assert "commit_x" in refused(simulate, "--set", "commit_x=7")


def test_nodes_are_given_as_to_start() -> None:
    found = parameters("--nnodes", "3:4", "--spares", "1")
    assert (found["nodes"], found["min_nodes"], found["spares"]) == (4, 3, 1)
    fixed = parameters("--nnodes", "4")
    assert (fixed["nodes"], fixed["min_nodes"], fixed["spares"]) == (4, 4, 0)
    for wrong in ("x", "2:", ":3", "-1"):
        assert "is not a number of nodes" in refused(simulate, "--nnodes", wrong)
    assert "min_nodes=4 is above nodes=3" in refused(simulate, "--nnodes", "4:3")


def test_the_choices_about_lost_nodes_are_compared() -> None:
    options = ["--mttf-hours", "4", "--nnodes", "6:8", "--choices", "--runs", "20"]
    result = run(simulate, *options)
    assert result.exit_code == 0 and "of paid nodes" in result.stdout, result.output
    found = json.loads(run(simulate, *options, "--json").stdout)["forecasts"]
    assert [(one["changes"]["min_nodes"], one["changes"]["spares"]) for one in found] == [
        (8, 0),
        (6, 0),
        (8, 1),
        (6, 1),
    ]
    assert found[2]["goodput_of_paid_nodes"] == pytest.approx(found[2]["goodput"] * 8 / 9)
    assert "pass --nnodes MIN:MAX" in refused(simulate, "--choices")
    assert "exclude each other" in refused(simulate, *options, "--vary", "commit_s=1,2")


@pytest.mark.parametrize("two", [("--gpus", "8", "--mttf-hours", "2"), ("--gpus", "8", "--trace", "hours.txt")])
def test_failures_have_one_source(two: tuple[str, ...]) -> None:
    assert "exclude each other" in refused(simulate, *two)


def test_a_plot_needs_something_to_compare_and_a_folder(tmp_path: Path) -> None:
    assert "--plot needs --vary" in refused(simulate, "--plot", str(tmp_path / "page.html"))
    vary = ("--vary", "commit_interval_s=60,600")
    assert "does not exist; create it" in refused(simulate, *vary, "--plot", str(tmp_path / "no" / "page.html"))


def test_a_study_is_printed_and_plotted(tmp_path: Path) -> None:
    options = ["--vary", "commit_interval_s=60,3600", "--mttf-hours", "2", "--work-hours", "2", "--runs", "20"]
    page = tmp_path / "page.html"
    result = run(simulate, *options, "--json", "--plot", str(page))
    assert result.exit_code == 0, result.output
    assert f"runner: {page}" in result.stderr and "<html" in page.read_text()
    assert json.loads(result.stdout) == json.loads(run(simulate, *options, "--json").stdout), "by seed, not by chance"


def test_a_trace_of_failures_is_read(tmp_path: Path) -> None:
    trace = tmp_path / "hours.txt"
    trace.write_text("1\nx\n")
    assert "hours.txt" in refused(simulate, "--trace", str(trace), "--runs", "20")
