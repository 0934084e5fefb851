"""The commands `runner doctor`, `plan` and `simulate`."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import click

from runner.cli.inspect import entries_at
from runner.cli.options import (
    POSITIVE,
    Number,
    as_json_option,
    config_options,
    load,
    named_program,
    size_of,
    table_console,
)
from runner.cli.start import request_of, start_options
from runner.errors import UsageError
from runner.system.text import visible

_work_hours = click.option(
    "--work-hours", type=POSITIVE, metavar="HOURS", default=24.0, show_default=True, help="Hours of training steps."
)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--notify", is_flag=True, help="Also post a test message to notify.url.")
@click.option(
    "--try-imports",
    is_flag=True,
    help="Also import the packages that PROGRAM imports, in a process of its own; PROGRAM itself is not run.",
)
@as_json_option
@start_options
def doctor(as_json: bool, notify: bool, try_imports: bool, **run: Any) -> None:
    """Run preflight checks on this node, with suggested fixes.

    Pass the options, PROGRAM and ARGS of `start`: nothing is started, no code of PROGRAM is run, and what is written
    for a check is removed again. Of PROGRAM, what it imports and the files among its ARGS are looked for; without one,
    the configured job's memory and the collectives between its ranks are checked, too. For a run on several nodes,
    start the command on all of them at the same time. The exit code is 1 if a check fails, so that the command can
    serve as an init container.
    """
    from rich.console import Console
    from rich.text import Text

    from runner.doctor import Level, examine
    from runner.doctor.settings import check_webhook

    # What a check writes is removed on the way out.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    click.get_current_context().call_on_close(lambda: signal.signal(signal.SIGTERM, before))
    asked, nested = request_of(run), named_program(run)
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    console, findings = Console(highlight=False, soft_wrap=True), []
    own = check_webhook(asked.config, os.environ) if notify else ()
    for finding in chain(own, examine(asked, nested, try_imports=try_imports)):
        findings.append(finding)
        if not as_json:
            line = Text.assemble((f"{finding.level.value:<4}", colours[finding.level]), "  ", (finding.subject, "bold"))
            console.print(line.append(f": {visible(finding.text)}"))
            if finding.fix:
                console.print(Text(f"      {visible(finding.fix)}", "dim"))
    if as_json:
        click.echo(json.dumps([{**vars(one), "level": one.level.value} for one in findings], indent=1))
    failed = sum(finding.level is Level.FAIL for finding in findings)
    warned = sum(finding.level is Level.WARN for finding in findings)
    if not as_json:
        click.echo(f"runner: {len(findings)} checks, {failed} failed, {warned} warnings")
    sys.exit(1 if failed else 0)


@click.command()
@config_options
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of GPUs per node (default: the GPUs of this node, else the number of ranks).",
)
@click.option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, e.g. 80GiB (default: that of the GPUs here).")
@click.option("--step-seconds", type=POSITIVE, metavar="SECONDS", help="Seconds per optimizer step (default: unknown).")
@_work_hours
@click.option(
    "--mttf-hours",
    type=POSITIVE,
    metavar="HOURS",
    help="Mean hours between failures of the run (default: derived from the number of GPUs).",
)
@click.option(
    "--reclaims-per-day",
    type=Number(min=0),
    metavar="N",
    default=1.0,
    show_default=True,
    help="Reclaims of one spot node per day.",
)
@click.option(
    "--copy-rate",
    metavar="SIZE",
    help="Bytes per second copied from a device into memory, e.g. 20GB (default: measured; 20GB with GPUs).",
)
@click.option("--machines", type=click.IntRange(min=1), hidden=True, help="Former name of --nnodes.")
@as_json_option
def plan(
    gpus: int | None,
    gpu_memory: str | None,
    step_seconds: float | None,
    work_hours: float,
    mttf_hours: float | None,
    reclaims_per_day: float,
    copy_rate: str | None,
    machines: int | None,
    as_json: bool,
    **run: Any,
) -> None:
    """Estimate memory, goodput and cost of a run.

    The plan also recommends a strategy and checkpoint intervals. Memory is computed from the shape of the model;
    bandwidths are measured on this node, at checkpoint.location.
    """
    from runner.plan.plan import Assumptions, make_plan, render

    if machines is not None:
        run["nnodes"] = machines
    config = load(run)
    assumptions = Assumptions(
        gpus, size_of("--gpu-memory", gpu_memory), step_seconds, work_hours, mttf_hours, reclaims_per_day,
        size_of("--copy-rate", copy_rate),
    )  # fmt: skip
    made = make_plan(config, assumptions, say=lambda text: click.echo(f"runner: {text} …", err=True))
    if as_json:
        click.echo(json.dumps(made.to_dict(), indent=1))
        return
    table_console().print(render(made))


@click.command()
@click.option("--from", "source", metavar="LOCATION", help="Run whose journal provides the durations (default: none).")
@_work_hours
@click.option(
    "--mttf-hours", type=POSITIVE, metavar="HOURS", help="Mean hours between failures (default: no failures)."
)
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of GPUs, instead of --mttf-hours; each as reliable as in Meta's clusters (1,024 GPUs: 7.9 hours).",
)
@click.option(
    "--nnodes",
    metavar="N|MIN:MAX",
    help="Number of nodes (default: 1): MAX, of which MIN are enough to continue, as for runner start.",
)
@click.option(
    "--spares", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="Number of spare nodes."
)
@click.option(
    "--choices",
    "compare_choices",
    is_flag=True,
    help="Compare what to do when a node is lost: wait for its replacement, continue on fewer nodes, or have spares.",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File with the hours between failures, one number per line, instead of --mttf-hours.",
)
@click.option(
    "--reclaims-per-day",
    type=Number(min=0),
    metavar="N",
    default=0.0,
    show_default=True,
    help="Announced reclaims of spot nodes per day.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Parameter to override; --list shows them; repeatable.",
)
@click.option("--list", "list_names", is_flag=True, help="List the parameters and their values.")
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=A,B,…",
    help="Parameter values to compare; repeatable, which compares all combinations.",
)
@click.option(
    "--target",
    type=Number(min=0, max=1),
    metavar="SHARE",
    help="Goodput to reach, from 0 to 1: list the combinations that reach it.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=20),
    metavar="N",
    default=200,
    show_default=True,
    help="Number of simulated runs per combination, at least 20.",
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of the random numbers.")
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="HTML file to write the sensitivity plot to; needs --vary.",
)
@as_json_option
def simulate(
    source: str | None,
    work_hours: float,
    mttf_hours: float | None,
    gpus: int | None,
    nnodes: str | None,
    spares: int,
    compare_choices: bool,
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
    """Simulate runs under failures.

    The output is the expected goodput (the share of the run time spent in steps that count) and its sensitivity to
    parameters.
    """
    from runner.plan.simulate.scenario import GPU_MTTF_S, HOUR_S
    from runner.plan.simulate.study import Study, choices, read_trace, render, scenario_of, to_page, variations

    if sum(given is not None for given in (mttf_hours, gpus, trace)) > 1:
        raise UsageError("--mttf-hours, --gpus and --trace exclude each other; pass only one")
    if gpus is not None:
        mttf_hours = GPU_MTTF_S / HOUR_S / gpus
    trace_s = read_trace(trace) if trace is not None else None
    entries = entries_at(source) if source is not None else []
    settings = (*_node_settings(nnodes, spares), *settings)
    scenario = scenario_of(entries, work_hours, mttf_hours, reclaims_per_day, settings)
    if list_names:
        for name, value in vars(scenario).items():
            click.echo(f"{name}={value:g}")
        return
    if plot is not None and not vary:
        raise UsageError("--plot needs --vary; pass --vary NAME=A,B,…")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {plot}: {plot.absolute().parent} does not exist; create it, or choose another folder")
    if compare_choices and vary:
        raise UsageError("--choices and --vary exclude each other; pass only one")
    varied = choices(scenario) if compare_choices else variations(vary, scenario)
    study = Study(scenario, varied, runs, seed, trace_s)
    if as_json:
        click.echo(json.dumps(study.to_dict(target), indent=1))
    else:
        table_console().print(render(study, target))
    if plot is not None:
        plot.write_text(to_page(study), encoding="utf-8")
        click.echo(f"runner: {plot.absolute()}", err=True)


def _node_settings(nnodes: str | None, spares: int) -> list[str]:
    """Return `--nnodes` and `--spares` as parameters of the simulation."""
    from runner.config.schema import split_nnodes

    found = [f"spares={spares}"] if spares else []
    if nnodes is None:
        return found
    limits = split_nnodes(nnodes)
    if limits is None:
        raise UsageError(f"--nnodes {nnodes!r} is not a number of nodes; pass N or MIN:MAX")
    smallest, largest = limits
    return [f"nodes={largest}", f"min_nodes={smallest}", *found]
