"""The command `runner rehearse`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from runner.cli.options import Number, as_json_option, config_options, load_program, program_arguments
from runner.errors import ExitCode, UsageError


@click.command(context_settings={"allow_interspersed_args": False})
@config_options
@click.option(
    "--steps", default=12, show_default=True, metavar="N", type=click.IntRange(min=6), help="Steps of each run."
)
@click.option("--all", "all_moments", is_flag=True, help="Also fill the disk while it saves.")
@click.option(
    "--limit",
    default=20,
    show_default=True,
    metavar="MINUTES",
    type=Number(min=0, min_open=True),
    help="Minutes that each run may take.",
)
@click.option("--keep", is_flag=True, help="Keep the folders of all runs, also if the job is safe.")
@as_json_option
@program_arguments
def rehearse(
    steps: int,
    all_moments: bool,
    limit: float,
    keep: bool,
    as_json: bool,
    **run: Any,
) -> None:
    """Prove that a job resumes exactly, before it is started.

    The first steps of the job, as `runner start` would run it, are run undisturbed, again, and then killed and stopped
    at chosen moments. What all of them compute is compared bit for bit. Nothing of yours is touched: checkpoints and
    outputs go to a temporary folder, nothing is published, and what follows the training in PROGRAM does not run.

    The exit code is 0 if the job is safe, and 78 if a resumed run is another run, or the job fails by itself.
    """
    from runner.chaos.run_under_test import JobUnderTest
    from runner.rehearse.disturbed_runs import MOMENTS, RehearsedJob
    from runner.rehearse.page import render, to_json
    from runner.system import processes

    program, config = load_program({**run, "output_dir": None}, {})
    is_temporary = run["output_dir"] is None
    folder = Path(tempfile.mkdtemp(prefix="rehearse-") if is_temporary else run["output_dir"]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; choose another --output-dir, or leave it out")
    config.make_absolute()
    (folder / "job.yaml").write_text(config.to_yaml())
    processes.become_subreaper()

    def report(line: str) -> None:
        click.echo(line, err=True)

    job = RehearsedJob(
        folder,
        JobUnderTest(["--config", str(folder / "job.yaml")], program.as_typed if program is not None else ()),
        steps=steps,
        limit_s=limit * 60,
        report=report,
    )
    try:
        findings = job.rehearse([moment for moment in MOMENTS if all_moments or not moment.is_optional])
    except (KeyboardInterrupt, SystemExit):
        # Stopped: nothing was found that its files would show.
        if is_temporary and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    nproc = config.launch.nproc_per_node
    ranks = f"{nproc} ranks" if isinstance(nproc, int) else "all ranks"
    text = render(findings, program.label if program is not None else "the bundled job", ranks, steps)
    click.echo(json.dumps(to_json(findings, steps), indent=2) if as_json else text)
    if findings.is_safe and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        report(f"the folders of all runs are in {folder}")
    sys.exit(int(ExitCode.DONE if findings.is_safe else ExitCode.DETERMINISTIC))
