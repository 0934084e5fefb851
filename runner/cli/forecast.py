"""runner doctor, plan and simulate: what a run will need and cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from runner.cli.inspect import entries_at
from runner.cli.options import POSITIVE, Number, config_options, load, size_of, table_console
from runner.errors import UsageError


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor(
    config_path: str | None, output_dir: str | None, settings: tuple[str, ...], as_json: bool, **launch: Any
) -> None:
    """Examine this machine for a run, before it is paid for.

    Give it the options of `start`; on several machines, on all of them at the same time. Exits with 1 if anything would
    fail, so that it can be an init container.
    """
    from rich.console import Console
    from rich.text import Text

    from runner.doctor import Level, examine

    config = load(config_path, output_dir, settings, launch)
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    console, findings = Console(highlight=False, soft_wrap=True), []
    for finding in examine(config):
        findings.append(finding)
        if not as_json:
            line = Text.assemble((f"{finding.level.value:<4}", colours[finding.level]), "  ", (finding.subject, "bold"))
            console.print(line.append(f": {finding.text}"))
            if finding.mend:
                console.print(Text(f"      {finding.mend}", "dim"))
    if as_json:
        click.echo(json.dumps([{**vars(one), "level": one.level.value} for one in findings], indent=1))
    failed = sum(finding.level is Level.FAIL for finding in findings)
    warned = sum(finding.level is Level.WARN for finding in findings)
    if not as_json:
        click.echo(f"runner: {len(findings)} checks, {failed} failed, {warned} warnings")
    sys.exit(1 if failed else 0)


@click.command()
@config_options
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs per machine (default: those found here; else ranks).")
@click.option("--gpu-memory", metavar="SIZE", help="Of one, e.g. 80GiB (default: those found here).")
@click.option("--machines", type=click.IntRange(min=1), help="Default: --nnodes.")
@click.option("--step-seconds", type=POSITIVE, help="Of one optimizer step, if known.")
@click.option("--work-hours", type=POSITIVE, default=24.0, show_default=True, help="Of steps.")
@click.option("--mttf-hours", type=POSITIVE, help="Mean time between failures of the run.")
@click.option("--reclaims-per-day", type=Number(min=0), default=1.0, show_default=True, help="Of one spot machine.")
@click.option(
    "--copy-rate", metavar="SIZE", help="From a device into memory, per second (default: measured, 20GB with GPUs)."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def plan(
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    gpus: int | None,
    gpu_memory: str | None,
    machines: int | None,
    step_seconds: float | None,
    work_hours: float,
    mttf_hours: float | None,
    reclaims_per_day: float,
    copy_rate: str | None,
    as_json: bool,
    **launch: Any,
) -> None:
    """Say what a run will need: which strategy fits, how often to save, goodput and cost.

    Memory is computed from the model's shape; bandwidths are measured here, at checkpoint.location.
    """
    from runner.plan.plan import Assumptions, make_plan, render

    config = load(config_path, output_dir, settings, launch)
    assumptions = Assumptions(
        gpus, size_of("--gpu-memory", gpu_memory), machines, step_seconds, work_hours, mttf_hours, reclaims_per_day,
        size_of("--copy-rate", copy_rate),
    )  # fmt: skip
    made = make_plan(config, assumptions)
    if as_json:
        click.echo(json.dumps(made.to_dict(), indent=1))
        return
    table_console().print(render(made))


@click.command()
@click.option("--from", "source", metavar="LOCATION", help="Take how long things take from this run's journal.")
@click.option("--work-hours", type=POSITIVE, default=24.0, show_default=True, help="Of steps.")
@click.option("--mttf-hours", type=POSITIVE, help="Mean time between failures (default: none).")
@click.option("--gpus", type=click.IntRange(min=1), help="Or so many, each as reliable as Meta's (1,024: 7.9 h).")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="File of hours of running between failures, one per line."
)
@click.option("--reclaims-per-day", type=Number(min=0), default=0.0, help="Announced ends of spot machines.")
@click.option("--set", "settings", multiple=True, metavar="NAME=SECONDS", help="Any other figure; --list names them.")
@click.option("--list", "list_names", is_flag=True, help="List the figures and their values.")
@click.option("--vary", multiple=True, metavar="NAME=A,B,…", help="Try each value; given twice: all pairs.")
@click.option("--target", type=Number(min=0, max=1), help="Say which of the settings tried reach this goodput.")
@click.option("--runs", type=click.IntRange(min=20), default=200, show_default=True, help="Runs to simulate for each.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write the sensitivity as one HTML file.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def simulate(
    source: str | None,
    work_hours: float,
    mttf_hours: float | None,
    gpus: int | None,
    trace: Path | None,
    reclaims_per_day: float,
    settings: tuple[str, ...],
    list_names: bool,
    vary: tuple[str, ...],
    target: float | None,
    runs: int,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Simulate runs under failures: how much of their time would count, and what that hangs on."""
    from runner.simulate.scenario import GPU_MTTF_S, HOUR_S
    from runner.simulate.study import Study, read_trace, render, scenario_of, to_page, variations

    if sum(given is not None for given in (mttf_hours, gpus, trace)) > 1:
        raise UsageError("--mttf-hours, --gpus and --trace say the same in three ways: give one of them")
    if gpus is not None:
        mttf_hours = GPU_MTTF_S / HOUR_S / gpus
    trace_s = read_trace(trace) if trace is not None else None
    entries = entries_at(source) if source is not None else []
    scenario = scenario_of(entries, work_hours, mttf_hours, reclaims_per_day, settings)
    if list_names:
        for name, value in vars(scenario).items():
            click.echo(f"{name}={value:g}")
        return
    if plot is not None and not vary:
        raise UsageError("--plot needs something that varies: --vary NAME=A,B,…")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {plot}: there is no folder {plot.absolute().parent}; make it, or write elsewhere")
    study = Study(scenario, variations(vary, scenario), runs, seed, trace_s)
    if as_json:
        click.echo(json.dumps(study.to_dict(target), indent=1))
    else:
        table_console().print(render(study, target))
    if plot is not None:
        plot.write_text(to_page(study), encoding="utf-8")
        click.echo(f"runner: {plot.absolute()}", err=True)
