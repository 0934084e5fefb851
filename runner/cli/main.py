"""The `runner` command. Thin: each command parses, calls, and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.storage.object_store import StorageTimeout
from checkpointing.threads import in_background
from runner import __version__
from runner.errors import ExitCode, RunnerError, UsageError
from runner.node.output import make_streams_lossy

T = TypeVar("T")
_WATCH_INTERVAL_S = 2.0
# Of what a look takes, so many times between two.
_WATCH_SHARE = 10
_STATUS_PATIENCE_S = 5.0


class _Number(click.FloatRange):
    """Within its bounds, and neither infinite nor NaN, which are in no order with them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r}: write a number", param, ctx)
        return number


_POSITIVE = _Number(min=0, min_open=True)

# Heavier imports stay inside the commands: `runner --help` answers in a blink.

_CONFIG_OPTIONS = [
    click.option(
        "--config",
        "config_path",
        type=click.Path(),
        help="YAML file (default: the bundled job, unless a model, data or SCRIPT is given).",
    ),
    click.option(
        "--output-dir",
        help="Folder of the run: checkpoints, journal, logs, best_model (default: runs/ + name of the configuration or "
        "script).",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any setting, e.g. trainer.learning_rate=1e-4.",
    ),
    click.option(
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="auto|N",
        help="Ranks on this machine; auto (default): one per GPU, or 2 where there is none.",
    ),
    click.option("--nnodes", type=int, help="Number of machines."),
    click.option("--node-rank", "--node_rank", type=int, help="This machine's number, from 0."),
    click.option("--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT", help="Where the machines meet."),
    click.option("--master-addr", "--master_addr", help="As in torchrun; with --master-port, instead of the above."),
    click.option("--master-port", "--master_port", type=int),
    click.option("--local-addr", "--local_addr", metavar="ADDRESS", help="By which the others reach this machine."),
]


def _config_options(command: Any) -> Any:
    for option in reversed(_CONFIG_OPTIONS):
        command = option(command)
    return command


def _load(
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    launch: dict[str, Any],
    restart: dict[str, Any] | None = None,
    script: str | None = None,
) -> Any:
    from runner.config.schema import load_config, parse_setting

    overrides = [parse_setting(text) for text in settings]
    if output_dir is not None:
        overrides.append(("output_dir", output_dir, "--output-dir"))
    for name, value in launch.items():
        if value is not None:
            text = int(value) if name == "nproc_per_node" and str(value).lstrip("-").isdigit() else value
            overrides.append((f"launch.{name}", text, f"--{name.replace('_', '-')} {value}"))
    for name, value in (restart or {}).items():
        if value is not None:
            overrides.append((f"restart.{name}", value, f"--{name.removesuffix('_s').replace('_', '-')} {value}"))
    return load_config(config_path, os.environ, overrides, script=script)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="runner")
def cli() -> None:
    """Keep a fine-tuning run going across crashes, preemption and bad checkpoints.

    \b
    Exit codes of `start`:  0 done · 2 usage · 75 checkpointed, start me again · 76 restarts spent ·
    74 storage failed · 78 would fail again · 79 no progress · 80 bad node · 81 no valid checkpoint, or not where it was
    """


@cli.command(context_settings={"allow_interspersed_args": False})
@_config_options
@click.option("--resume", default="auto", show_default=True, metavar="auto|never|STEP", help="Where to go on from.")
@click.option("--overwrite", is_flag=True, help="With --resume never: move an existing run aside and start anew.")
@click.option(
    "--resume-from",
    "--resume_from",
    metavar="PATH",
    help="Checkpoint to start from while the run has none of its own: ours, or a stock Trainer's folder.",
)
@click.option(
    "--allow-changes",
    "--allow_changes",
    is_flag=True,
    help="Resume from the checkpoints of a job that differs from this one, for example by an edited script.",
)
@click.option("--max-restarts", "--max_restarts", type=int, help="Restarts without a new checkpoint between them.")
@click.option("--grace", type=_Number(min=0), metavar="SECONDS", help="From a stop request to the end of the ranks.")
@click.option("--metrics-port", "--metrics_port", type=int, help="Answer Prometheus there, at /metrics.")
@click.option("--cold", is_flag=True, default=None, help="Fresh interpreters instead of forks of a preloaded one.")
@click.option(
    "--debug",
    is_flag=True,
    help="The job made small, in a folder of its own, with all that torch and NCCL have to say.",
)
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def start(
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    resume: str,
    overwrite: bool,
    resume_from: str | None,
    allow_changes: bool,
    max_restarts: int | None,
    grace: float | None,
    metrics_port: int | None,
    debug: bool,
    script: str | None,
    args: tuple[str, ...],
    **launch: Any,
) -> None:
    """Run a job to its end, restarting it as often as it takes.

    Without SCRIPT: supervised fine-tuning as configured. With SCRIPT (and its ARGS): your own training script, as
    torchrun would run it; let it save through checkpointing.transformers.resilient to make it resumable.
    """
    from runner.system.event_loop import StopRequest

    # Only here: `status --watch | head` is to end with its reader.
    make_streams_lossy()
    # From here on; what comes before the first attempt is not lost.
    stop = StopRequest()
    stop.count_signals()

    from runner.cache import discard_unsealed
    from runner.journal.summary import render
    from runner.node.node import Job
    from runner.supervisor import preflight
    from runner.supervisor.follower import Follower
    from runner.supervisor.identity import between_nodes, identify
    from runner.supervisor.supervisor import Supervisor, check_resume_step, check_storage
    from runner.ui.progress import ProgressDisplay

    restart = {"max_restarts": max_restarts, "grace_s": grace}
    if metrics_port is not None:
        settings = (*settings, f"monitoring.port={metrics_port}")
    config = _load(config_path, output_dir, settings, launch, restart, script)
    if script is not None and not Path(script).is_file():
        raise UsageError(f"script {script!r} does not exist; give the path of a Python file")
    if debug:
        from runner.config.debug import debugging_environment, for_debugging
        from runner.hardware.gpus import find_gpus

        if script is not None:
            raise UsageError(f"--debug makes the configured job small; what {script} does, only its own options can")
        if resume not in ("auto", "never"):
            raise UsageError(f"--debug begins anew, in a folder of its own; leave --resume {resume} out")
        gpus = find_gpus()
        config, resume, overwrite = for_debugging(config, len(gpus)), "never", True
        os.environ.update(debugging_environment(os.environ, on_gpu=bool(gpus)))
    step = _resume(resume)
    if overwrite and step != "never":
        raise UsageError("--overwrite goes with --resume never")
    starting_point = preflight.starting_point(resume_from) if resume_from is not None else ""

    def say(text: str) -> None:
        click.echo(f"runner: {text}")

    directory = _directory(config)
    directory.create()
    directory.lock(say, lambda: bool(stop))
    identity = _unless_stopped(stop, lambda: identify(config, script, args))
    if step == "auto" and preflight.is_done(config, directory, identity):
        say("this run is finished; nothing to do (--resume never --overwrite starts it over)")
        click.echo(render(_summary(directory), _places(config, directory)))
        return
    caveats, is_away = _unless_stopped(stop, lambda: check_storage(config))
    first_node = config.launch.node_rank == 0
    place: str | None = None
    if not first_node:
        preflight.write_job(directory, identity)
    elif not is_away or step != "auto":
        # The location is the run's: the first node's runner checks and prepares it.
        lock = preflight.LocationLock(config, say, None if directory.is_locked else 0.0)
        _unless_stopped(stop, lock.hold)
        if step == "never":
            if _start_anew(config, directory, overwrite):
                lock.hold()
        else:
            check = functools.partial(preflight.examine, config, directory, identity, allow_changes=allow_changes)
            caveats += _unless_stopped(stop, check)
        if isinstance(step, int):
            for kept in check_resume_step(config, step):
                say(f"newer than step {step}, kept as {kept}")
        place = preflight.admit(config, directory, identity)
    if first_node:
        discard_unsealed(directory.cache)
    # A restart, or a script that changes its directory, must find the same places.
    config.make_absolute()
    directory.config.write_text(config.to_yaml())
    display = ProgressDisplay(quiet=not first_node, live=script is None and not debug)
    job = Job(
        str(Path(script).absolute()) if script is not None else None,
        args,
        show_output=script is not None or debug,
        resume_from=starting_point,
        allow_changes=allow_changes,
    )
    display.message(f"run {directory.run_id()} in {directory.root}, resume {resume}")
    for caveat in caveats:
        display.message(caveat)
    if first_node and config.monitoring.port is not None:
        from runner.ui.prometheus import RunCollector, serve

        # Others can reach it only where there are others, or the user says so.
        address = config.monitoring.address or ("127.0.0.1" if config.launch.nnodes == 1 else "0.0.0.0")
        serve(address, config.monitoring.port, RunCollector(directory.journal))
    shared = between_nodes(identity, config.checkpoint.location)
    if not first_node:
        follower = Follower(config, directory, job, display, stop, identity=shared, compared=not allow_changes)
        sys.exit(int(follower.run()))
    supervisor = Supervisor(config, directory, job, display, stop, place=place, identity=shared)
    exit_code = supervisor.run()
    summary = _summary(directory)
    if summary.step > 0:
        click.echo(render(summary, _places(config, directory)))
    elif exit_code == ExitCode.DONE:
        click.echo("runner: finished")
    if exit_code != ExitCode.DONE:
        # Not by the journal, which may have been moved away, or its disk may be full.
        state = "stopped" if exit_code == ExitCode.PREEMPTED else "failed"
        shown = supervisor.failed_log is not None and exit_code != ExitCode.PREEMPTED
        log = f"; log: {supervisor.failed_log}" if shown else ""
        click.echo(f"runner: {state}: {supervisor.reason} (exit code {int(exit_code)}{log})")
    sys.exit(int(exit_code))


def _unless_stopped(stop: Any, work: Callable[[], T]) -> T:
    """What may take a minute where a server is silent; a stop request ends the wait.

    Raises:
        SystemExit: with the code of a stop.
    """
    outcome = in_background(work, "check")
    while not stop:
        try:
            return outcome.result(timeout=0.05)
        except TimeoutError:
            if outcome.done():
                raise
    click.echo("runner: stopped before anything was started")
    sys.stdout.flush()
    # The thread may wait for a server yet.
    os._exit(int(ExitCode.PREEMPTED))


@cli.command()
@_config_options
@click.option("--trainer-options", is_flag=True, help="List the SFTConfig options that `trainer:` accepts.")
def config(
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    trainer_options: bool,
    **launch: Any,
) -> None:
    """Print the configuration that `start` would use: defaults < YAML < environment < command line."""
    if trainer_options:
        from runner.config import trainer_options as options

        for name, kind in sorted(options.fields().items()):
            if name not in options.RESERVED:
                click.echo(f"{name}: {options.describe(kind)}")
        return
    click.echo(_load(config_path, output_dir, settings, launch).to_yaml(), nl=False)


@cli.command()
@click.argument("location", required=False)
@click.option("--watch", is_flag=True, help="Go on showing it until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(location: str | None, watch: bool, as_json: bool) -> None:
    """Show where a run stands, from its journal.

    LOCATION: the run's folder, or the directory or URL of its checkpoints (default: $OUTPUT_DIR, or the newest run in
    ./runs). Works from any machine that can read it; beside checkpoints the journal is some seconds old.
    """
    from rich.console import Console
    from rich.live import Live

    from runner.journal.mirror import History
    from runner.journal.summary import summarise
    from runner.ui.status import is_over, panel, runner_is_gone

    place = location if location is not None else _newest_run()

    # For people, what is at hand now.
    history = History(place, None if as_json else _STATUS_PATIENCE_S)

    def look() -> tuple[Any, bool, float]:
        """And what it has taken to sum up, in seconds: a journal of weeks takes its time."""
        events, began = history.events(), time.thread_time()
        return summarise(events, now=time.time()), runner_is_gone(events), time.thread_time() - began

    run, gone, took_s = look()
    if as_json:
        click.echo(json.dumps({**run.to_dict(), "runner_gone": gone}, indent=1))
        return

    def page() -> Any:
        unread = {"out of date": history.unread} if history.unread else {}
        return panel(run, time.time(), {"location": place, **unread}, gone=gone)

    console = Console(highlight=False)
    if not watch:
        console.print(page())
        return
    try:
        with Live(page(), console=console, auto_refresh=False) as live:
            while not is_over(run) and not gone:
                time.sleep(max(_WATCH_INTERVAL_S, _WATCH_SHARE * took_s))
                run, gone, took_s = look()
                live.update(page(), refresh=True)
    except KeyboardInterrupt:
        return


def _newest_run() -> str:
    """The run that somebody most likely means who names none.

    Raises:
        UsageError: there is none.
    """
    from runner.journal.journal import JOURNAL_NAME

    if folder := os.environ.get("OUTPUT_DIR"):
        return folder
    written: list[tuple[float, str]] = []
    for journal in Path("runs").glob(f"*/{JOURNAL_NAME}"):
        with contextlib.suppress(OSError):
            written.append((journal.stat().st_mtime, str(journal.parent)))
    if not written:
        raise UsageError("there is no run in ./runs; give the output_dir of one, or the location of its checkpoints")
    return max(written)[1]


def _events_at(place: str) -> list[dict[str, Any]]:
    from runner.journal.mirror import History

    history = History(place)
    events = history.events()
    if history.unread:
        click.echo(f"runner: told without what could not be read: {history.unread}", err=True)
    return events


@cli.command()
@_config_options
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

    config = _load(config_path, output_dir, settings, launch)
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


@cli.command()
@_config_options
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs per machine (default: those found here; else ranks).")
@click.option("--gpu-memory", metavar="SIZE", help="Of one, e.g. 80GiB (default: those found here).")
@click.option("--machines", type=click.IntRange(min=1), help="Default: --nnodes.")
@click.option("--step-seconds", type=_POSITIVE, help="Of one optimizer step, if known.")
@click.option("--work-hours", type=_POSITIVE, default=24.0, show_default=True, help="Of steps.")
@click.option("--mttf-hours", type=_POSITIVE, help="Mean time between failures of the run.")
@click.option("--reclaims-per-day", type=_Number(min=0), default=1.0, show_default=True, help="Of one spot machine.")
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

    config = _load(config_path, output_dir, settings, launch)
    assumptions = Assumptions(
        gpus, _size("--gpu-memory", gpu_memory), machines, step_seconds, work_hours, mttf_hours, reclaims_per_day,
        _size("--copy-rate", copy_rate),
    )  # fmt: skip
    made = make_plan(config, assumptions)
    if as_json:
        click.echo(json.dumps(made.to_dict(), indent=1))
        return
    _console().print(render(made))


def _console() -> Any:
    """For tables: in a file or a pipe as wide as they are."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def _size(option: str, text: str | None) -> int | None:
    from checkpointing.memory import parse_bytes

    try:
        size = parse_bytes(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if size == 0:
        raise UsageError(f"{option} {text}: write a size above 0")
    return size


@cli.command()
@click.option("--from", "source", metavar="LOCATION", help="Take how long things take from this run's journal.")
@click.option("--work-hours", type=_POSITIVE, default=24.0, show_default=True, help="Of steps.")
@click.option("--mttf-hours", type=_POSITIVE, help="Mean time between failures (default: none).")
@click.option("--gpus", type=click.IntRange(min=1), help="Or so many, each as reliable as Meta's (1,024: 7.9 h).")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="File of hours of running between failures, one per line."
)
@click.option("--reclaims-per-day", type=_Number(min=0), default=0.0, help="Announced ends of spot machines.")
@click.option("--set", "settings", multiple=True, metavar="NAME=SECONDS", help="Any other figure; --list names them.")
@click.option("--list", "list_names", is_flag=True, help="List the figures and their values.")
@click.option("--vary", multiple=True, metavar="NAME=A,B,…", help="Try each value; given twice: all pairs.")
@click.option("--target", type=_Number(min=0, max=1), help="Say which of the settings tried reach this goodput.")
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
    events = _events_at(source) if source is not None else []
    scenario = scenario_of(events, work_hours, mttf_hours, reclaims_per_day, settings)
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
        _console().print(render(study, target))
    if plot is not None:
        plot.write_text(to_page(study), encoding="utf-8")
        click.echo(f"runner: {plot.absolute()}", err=True)


@cli.command()
@click.argument("location", required=False)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: report.html in LOCATION or here."
)
@click.option("--price-per-hour", type=_Number(min=0), help="Of one machine, on demand (cost.price_per_hour).")
@click.option("--spot-discount", type=_Number(min=0, max=1, max_open=True), help="Share of it that is not paid.")
def report(
    location: str | None, output: Path | None, price_per_hour: float | None, spot_discount: float | None
) -> None:
    """Write a run's story as one HTML file: time line, loss, where the time went, checkpoints, cost.

    LOCATION: as for `status`. The file needs no network, and can be sent to others.
    """
    from runner.ui.report import render_page

    place = location if location is not None else _newest_run()
    page = render_page(_events_at(place), place, time.time(), price_per_hour, spot_discount)
    own = "://" not in place and (Path(place) / "journal.jsonl").exists()
    output = output or (Path(place) if own else Path()) / "report.html"
    output.write_text(page, encoding="utf-8")
    click.echo(f"runner: {output.absolute()}")


@cli.command(context_settings={"allow_interspersed_args": True})
@click.argument("config_file", required=False, metavar="[CONFIG]", type=click.Path())
@_config_options
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="Faults to strike with.")
@click.option("--minutes", type=_Number(min=0), help="And go on for so long.")
@click.option("--seed", type=int, help="Of faults and moments; a new one by default.")
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only this kind; may be given again.")
@click.option("--list", "list_faults", is_flag=True, help="List the kinds of faults.")
@click.option("--deterministic", is_flag=True, help="Switch deterministic algorithms on (trainer.full_determinism).")
@click.option("--tolerance", type=_Number(min=0), help="Tensors may differ by this share of their norm.")
@click.option("--keep", is_flag=True, help="Keep the folders of runs that ended well, too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the verdict there.")
def chaos(
    config_file: str | None,
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    kills: int,
    minutes: float | None,
    seed: int | None,
    faults: tuple[str, ...],
    list_faults: bool,
    deterministic: bool,
    tolerance: float | None,
    keep: bool,
    json_file: Path | None,
    **launch: Any,
) -> None:
    """Break a job on purpose, and see that nothing is lost.

    Runs the job of CONFIG (default: the bundled one) in peace, then again while it is killed, stopped, preempted and
    its storage damaged, and compares the last checkpoints bit for bit. Exits with 1 if anything was lost or differs.
    """
    from runner.chaos.campaign import Campaign
    from runner.chaos.faults import FAULTS
    from runner.chaos.locations import Places
    from runner.chaos.verdict import render, to_json

    names = [fault.name for fault in FAULTS]
    if list_faults:
        click.echo("\n".join(names))
        return
    for name in faults:
        if name not in names:
            raise UsageError(f"--fault {name!r} is not known; `runner chaos --list` lists them")
    if config_file is not None and config_path is not None:
        raise UsageError(f"CONFIG {config_file!r} and --config {config_path!r}: give one of them")
    if deterministic:
        settings = (*settings, "trainer.full_determinism=true")
    seed = int.from_bytes(os.urandom(3), "big") if seed is None else seed
    config = _load(config_file or config_path, None, settings, launch)
    config.make_absolute()
    folder = Path(output_dir or f"runs/chaos/{time.strftime('%Y%m%d-%H%M%S')}-seed-{seed}").absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--output-dir {folder} is not empty; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.yaml"
    job.write_text(config.to_yaml())
    click.echo(f"runner chaos: seed {seed}, in {folder}")
    campaign = Campaign(
        folder,
        ["--config", str(job)],
        places=Places(config, folder.name),
        seed=seed,
        faults=[fault for fault in FAULTS if not faults or fault.name in faults],
        tolerance=tolerance,
        tell=click.echo,
    )
    result = campaign.run(kills, seconds=None if minutes is None else 60 * minutes, keep=keep)
    click.echo(render(result, seed))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(result, seed), indent=2) + "\n")
    if not result.well:
        click.echo(
            f"runner chaos: NOT WELL; the folders are kept in {folder}; --seed {seed} draws the same faults again"
        )
        sys.exit(1)


@cli.group()
def checkpoints() -> None:
    """Look at a run's checkpoints."""


@checkpoints.command("list")
@click.argument("location")
def list_checkpoints(location: str) -> None:
    """List the checkpoints at LOCATION (a run's folder, a checkpoints folder, or a URL), newest first.

    Sizes are checked, contents are not: see verify.
    """
    from runner.ui.status import duration

    first = _tiers(location)
    parts = [("", first), *((stage.name, tiers) for stage, tiers in first.stages)]
    if not any(tiers.catalog.entries() for _, tiers in parts):
        click.echo(f"no checkpoints at {location}")
        return
    click.echo(f"{'step':>8}  {'age':>12}  {'size':>12}  {'tier':<6}  whole")
    for stage, tiers in parts:
        if stage:
            click.echo(f"{stage}:")
        for entry in tiers.catalog.entries():
            tier = tiers.name(entry.storage)
            if entry.manifest is None:
                click.echo(f"{entry.step:>8}  {'':>12}  {'':>12}  {tier:<6}  no: {entry.problem}")
                continue
            age = duration(time.time() - entry.manifest.created_at)
            size = f"{entry.manifest.total_bytes / 1e6:.1f} MB"
            click.echo(
                f"{entry.step:>8}  {age:>12}  {size:>12}  {tier:<6}  sizes ok (attempt {entry.manifest.attempt})"
            )


@checkpoints.command()
@click.argument("location")
@click.option("--step", type=int, help="Only this one.")
def verify(location: str, step: int | None) -> None:
    """Read the checkpoints at LOCATION again and compare every digest; exit 1 if one is damaged."""
    from checkpointing.catalog import verify as verify_copy
    from checkpointing.errors import InvalidCheckpoint
    from checkpointing.manifest import missing_member

    if step is None and (one := re.fullmatch(r"(.*)/checkpoint-(\d{1,15})/?", location)) is not None:
        location, step = one[1], int(one[2])
    first = _tiers(location)
    parts = [("", first), *((stage.name, tiers) for stage, tiers in first.stages)]
    found = [(stage, tiers, entry) for stage, tiers in parts for entry in tiers.catalog.entries()]
    found = [(stage, tiers, entry) for stage, tiers, entry in found if step in (None, entry.step)]
    if not found:
        raise UsageError(f"there is no {'checkpoint' if step is None else f'checkpoint-{step}'} at {location}")
    damaged = 0
    for stage, tiers, entry in found:
        name = f"{entry.step:>8}  {tiers.name(entry.storage):<6}" + (f"  {stage}" if stage else "")
        try:
            if entry.manifest is None:
                raise InvalidCheckpoint(entry.storage.describe(entry.step), str(entry.problem))
            with _progress_bar(f"checkpoint-{entry.step}", entry.manifest.total_bytes) as advance:
                manifest = verify_copy(entry.storage, entry.step, advance)
            if (lacking := missing_member(file.name for file in manifest.files)) is not None:
                raise InvalidCheckpoint(entry.storage.describe(entry.step), f"{lacking} is not among its files")
            click.echo(f"{name}  ok       {len(manifest.files)} files, {manifest.total_bytes / 1e6:.1f} MB")
        except InvalidCheckpoint as error:
            if entry.manifest is not None and entry.step not in entry.storage.steps():
                click.echo(f"{name}  gone     removed meanwhile, as its run keeps fewer")
                continue
            damaged += 1
            click.echo(f"{name}  INVALID  {error}")
    sys.exit(1 if damaged else 0)


@checkpoints.command()
@click.argument("location")
@click.argument("step", type=int)
@click.argument("directory", type=click.Path(path_type=Path))
def export(location: str, step: int, directory: Path) -> None:
    """Copy the checkpoint of STEP at LOCATION to DIRECTORY, in Hugging Face layout; every digest is compared."""
    from checkpointing.export import export_checkpoint

    entry = _tiers(location).catalog.find(step)
    assert entry.manifest is not None
    with _progress_bar(f"checkpoint-{step}", entry.manifest.total_bytes) as advance:
        manifest = export_checkpoint(entry.storage, step, directory, advance)
    click.echo(f"checkpoint-{step}: {len(manifest.files)} files, {manifest.total_bytes / 1e6:.1f} MB, in {directory}")


@checkpoints.command()
@click.argument("location")
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="How many of the newest to keep.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="STEPS", help="And every multiple of so many steps.")
def prune(location: str, keep_last: int, keep_every: int | None) -> None:
    """Remove all but the newest checkpoints at LOCATION. Those that are not whole do not count, and stay.

    Of a run's folder, what its configuration keeps for good stays as well: the best by `metric_for_best_model`, and
    every multiple of `keep_every_steps`. The newest that can be resumed from, by its digests, always stays.
    """
    from checkpointing.catalog import Catalog
    from checkpointing.catalog import verify as verify_copy
    from checkpointing.errors import InvalidCheckpoint
    from checkpointing.retention import Retention, best_by, steps_to_remove

    config = _config_of(location)
    metric, greater = None, False
    if config is not None:
        # Held to the end: a run that lives prunes by itself, and none may begin meanwhile.
        _directory(config).lock(cancelled=lambda: True)
        metric, greater = best_by(config.best_metric, config.trainer.get("greater_is_better"))
        keep_every = keep_every or config.checkpoint.keep_every_steps
    for storage in _tiers(location, config).nearest_first:
        manifests = {entry.step: entry.manifest for entry in Catalog(storage).entries() if entry.manifest is not None}
        superfluous = steps_to_remove(manifests.values(), Retention(keep_last, keep_every, metric, greater))
        for step in sorted(manifests, reverse=True) if superfluous else ():
            superfluous = [other for other in superfluous if other != step]
            try:
                verify_copy(storage, step)
                break
            except InvalidCheckpoint as error:
                click.echo(f"damaged, kept: {error}")
        for step in superfluous:
            storage.remove(step)
            click.echo(f"removed {storage.describe(step)}")


def _config_of(location: str) -> Any:
    """The configuration of the run whose folder this is; None: it is something else."""
    from runner.config.schema import load_config

    root = Path(location.removeprefix("file://"))
    if not ((root / "config.yaml").is_file() and (root / "journal.jsonl").exists()):
        return None
    config = load_config(str(root / "config.yaml"), {}, needs_data=False)
    config.move_to(root)
    return config


def _tiers(location: str, config: Any = None) -> Any:
    """Where the checkpoints of a run lie, by its folder (its configuration, where that is known); or at a place given
    directly."""
    from checkpointing.tiers import open_tiers

    try:
        config = config or _config_of(location)
        if config is not None:
            return config.tiers
        if location.startswith("file:///"):
            location = location.removeprefix("file://")
        root = Path(location)
        tiers = open_tiers(str(root / "checkpoints") if (root / "checkpoints").is_dir() else location)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not location or ("://" not in location and not root.is_dir()):
        raise UsageError(f"{location!r} is not a folder; give a run's output_dir or its checkpoints folder")
    return tiers


@contextlib.contextmanager
def _progress_bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Of a long transfer, on a terminal; gone when it is through."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _directory(config: Any) -> Any:
    from runner.journal.run_directory import RunDirectory

    return RunDirectory(config.output_dir, config.launch.node_rank)


def _resume(text: str) -> str | int:
    if text in ("auto", "never"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"--resume {text!r} is not allowed; use auto, never, or the number of a committed step")


def _start_anew(config: Any, directory: Any, overwrite: bool) -> bool:
    """Returns whether an earlier run was moved aside."""
    from checkpointing.storage import LocalStorage

    tiers = config.tiers
    steps = {step for storage in tiers.nearest_first for step in storage.steps()}
    if not steps and not isinstance(tiers.durable, LocalStorage) and tiers.durable.read_note() is not None:
        # What another run has failed of here does not concern this one.
        tiers.durable.write_note(b"{}")
    if not steps and not directory.journal.exists():
        return False
    if not overwrite:
        raise UsageError(
            f"--resume never: {directory.root} already holds a run; add --overwrite to move it aside, or choose "
            "another --output-dir"
        )
    folders = [storage.root for storage in tiers.nearest_first if isinstance(storage, LocalStorage)]
    if not isinstance(tiers.durable, LocalStorage) and tiers.durable.steps():
        raise UsageError(
            f"--overwrite: {tiers.durable.location} holds checkpoints, which cannot be moved there; choose another "
            "checkpoint.location, or remove them yourself"
        )
    click.echo(f"runner: the earlier run is kept in {directory.move_aside(folders)}")
    return True


def _summary(directory: Any) -> Any:
    from runner.supervisor.supervisor import summary_of

    return summary_of(directory)


def _places(config: Any, directory: Any) -> dict[str, str]:
    places = {
        "best model": str(directory.best_model),
        "checkpoints": config.checkpoint_location,
        **({"local tier": config.checkpoint.local_tier} if config.checkpoint.local_tier else {}),
        "journal": str(directory.journal),
        "logs": str(directory.logs),
    }
    return {name: path for name, path in places.items() if "://" in path or Path(path).exists()}


def main() -> None:
    """Entry point: every expected error is one line on stderr and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or log of another character set gets a question mark.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except click.Abort:
        sys.exit(130)
    except RunnerError as error:
        click.echo(f"runner: error: {error}", err=True)
        sys.exit(int(error.exit_code))
    except CheckpointError as error:
        click.echo(f"runner: error: {error}", err=True)
        sys.exit(ExitCode.BUDGET_SPENT if isinstance(error, StorageUnreachable) else ExitCode.USAGE)
    except StorageTimeout as error:
        click.echo(f"runner: error: {error}", err=True)
        sys.exit(ExitCode.BUDGET_SPENT)
    except OSError as error:
        if not error.filename and not _can_be_written(1):
            click.echo(f"runner: error: standard output cannot be written: {error.strerror or error}", err=True)
            # What is left in its buffer would be tried again at the end.
            os._exit(int(ExitCode.STORAGE_FAILED))
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"runner: error: {place}{error.strerror or error}", err=True)
        sys.exit(ExitCode.USAGE)


def _can_be_written(stream: int) -> bool:
    # What failed is gone from Python's buffers, so one more byte is tried.
    try:
        os.write(stream, b"\n")
    except OSError:
        return False
    return True
