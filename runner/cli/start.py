"""The commands `runner init` and `runner start`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from runner.cli.options import Number, config_options, load_program, program_arguments
from runner.errors import UsageError
from runner.ranks.output import make_streams_lossy

_START_OPTIONS = [
    click.option(
        "--resume",
        default="auto",
        show_default=True,
        metavar="auto|never|STEP",
        help="Checkpoint to resume from: auto selects the newest valid one, never starts from the beginning.",
    ),
    click.option(
        "--overwrite",
        is_flag=True,
        help="With --resume never: move an existing run aside instead of refusing to start.",
    ),
    click.option(
        "--resume-from",
        metavar="PATH",
        help="Checkpoint of another run, or of a stock Trainer, to start from while this run has no checkpoint.",
    ),
    click.option(
        "--init-from",
        metavar="PATH",
        help="Folder of a model or a checkpoint with whose weights, and nothing else, a new run begins.",
    ),
    click.option(
        "--allow-changes",
        is_flag=True,
        help="Resume from the checkpoints of a job that differs from this one, for example by an edited script.",
    ),
    click.option(
        "--resilient",
        type=click.Choice(["auto", "require", "off"]),
        help="Make the Trainers of PROGRAM resilient: auto, require (or else end with 78), or off (default: auto).",
    ),
    click.option(
        "--max-restarts",
        type=int,
        metavar="N",
        help="Maximum number of restarts without a new checkpoint between them (default: 5).",
    ),
    click.option(
        "--grace",
        type=Number(min=0),
        metavar="SECONDS",
        help="Seconds that ranks may take to checkpoint after a stop request (default: 60).",
    ),
    click.option(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="Port on the leading node that serves Prometheus metrics at /metrics (default: none).",
    ),
    click.option(
        "--cold",
        is_flag=True,
        default=None,
        help="Start ranks in fresh interpreters instead of forks of a preloaded one.",
    ),
    click.option(
        "--debug", is_flag=True, help="Run a scaled-down job with verbose logging, in a folder of its own (DIR-debug)."
    ),
]


@click.command()
@click.argument("path", default="job.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite PATH if it exists.")
def init(path: Path, force: bool) -> None:
    """Write a commented configuration file.

    PATH (default: job.yaml) gets the configuration of the bundled example job, with every other key as a comment.
    """
    from runner.config.schema import JOB_SCHEMA
    from runner.config.template import job_template

    folder = path.absolute().parent
    # A path inside the project is the same on other machines.
    schema = JOB_SCHEMA.relative_to(folder) if JOB_SCHEMA.is_relative_to(folder) else JOB_SCHEMA
    text = job_template(str(schema), path.name)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; pass --force to overwrite it, or choose another PATH") from None
    click.echo(f"runner: wrote {path}; start the run with: runner start --config {path}")


def start_options(command: Any) -> Any:
    """Decorate a command with everything that `start` accepts; `request_of` resolves it."""
    command = program_arguments(command)
    for option in reversed(_START_OPTIONS):
        command = option(command)
    return config_options(command)


@click.command(context_settings={"allow_interspersed_args": False})
@start_options
def start(**run: Any) -> None:
    """Run a training job to completion; restart it after failures.

    Without PROGRAM, run the configured supervised fine-tuning. PROGRAM and its ARGS are what you would pass to
    torchrun, or type without runner: a Python file, -m MODULE, or a command of a Python package, such as
    llamafactory-cli train job.yaml. What a launcher in it says of ranks (torchrun, accelerate launch, deepspeed) is
    taken over. Hugging Face and Lightning trainers become resumable by themselves (--resilient); your own loop saves
    through checkpointing.CheckpointManager.
    """
    from checkpointing.host.limits import raise_open_files
    from runner.system.event_loop import StopRequest

    # Only `start` survives the loss of its terminal or pipe; `status --watch | head` should end.
    make_streams_lossy()
    # Signals are counted from here on, so that a stop request before the first attempt is not lost.
    stop = StopRequest()
    stop.count_signals()
    # A leader has a connection for each node, and each rank has several for each other rank.
    raise_open_files()

    from runner.boot import FOLLOWS_ENV, Boot

    follows = os.environ.pop(FOLLOWS_ENV, None) is not None
    asked = request_of(run, follows=follows)
    boot = Boot(asked.config, asked.job, stop, step=asked.step, overwrite=asked.overwrite, follows=follows)
    sys.exit(int(boot.run()))


def request_of(options: dict[str, Any], *, follows: bool = False) -> Any:
    """Return the `StartRequest` of the values of `start_options`.

    Args:
        options: The values.
        follows: Whether the run that this process has led goes on, under another leader.

    Raises:
        UsageError: The command line or the configuration is invalid.
    """
    from checkpointing.host.environment import INIT_FROM_ENV
    from runner.config.checks import check_has_rank
    from runner.journal.attempts import Job
    from runner.session.preflight import StartRequest, initial_folder, starting_point

    run = dict(options)
    own = ("resume", "overwrite", "resume_from", "init_from", "allow_changes", "debug")
    resume, overwrite, resume_from, init_from, allow_changes, debug = (run.pop(name) for name in own)
    restart = {"max_restarts": run.pop("max_restarts"), "grace_s": run.pop("grace")}
    for name, key in (("resilient", "resume.resilient"), ("metrics_port", "monitoring.port")):
        value = run.pop(name)
        if value is not None:
            run["settings"] = (*run["settings"], f"{key}={value}")
    program, config = load_program(run, restart)
    if debug:
        config, resume, overwrite = _scaled_down(config, program, resume), "never", True
    check_has_rank(config, config.launch.nnodes)
    if follows:
        resume, overwrite = "auto", False
    step = resume_step(resume)
    if overwrite and step != "never":
        raise UsageError("--overwrite needs --resume never")
    if init_from is not None:
        if resume_from is not None:
            raise UsageError("--init-from and --resume-from exclude each other: weights alone, or all of a checkpoint")
        os.environ[INIT_FROM_ENV] = initial_folder(init_from)
    start_from = starting_point(resume_from) if resume_from is not None else ""
    return StartRequest(config, Job(program, program is not None or debug, start_from, allow_changes), step, overwrite)


def _scaled_down(config: Any, program: Any, resume: str) -> Any:
    """Return the configuration of a scaled-down job, and set what this process needs for it."""
    from runner.config.debug import debugging_environment, for_debugging
    from runner.system.gpus import find_gpus

    if program is not None:
        raise UsageError(
            f"--debug cannot scale down a script; pass smaller sizes to {program.label} by its own options"
        )
    if resume not in ("auto", "never"):
        raise UsageError(f"--debug always starts from scratch, in its own folder; remove --resume {resume}")
    gpus = find_gpus()
    os.environ.update(debugging_environment(os.environ, on_gpu=bool(gpus)))
    return for_debugging(config, len(gpus))


def resume_step(text: str) -> str | int:
    """Parse the value of `--resume`: auto, never, or a step."""
    if text in ("auto", "never"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"--resume {text!r} is not allowed; use auto, never, or the number of a committed step")
