"""The commands `runner config`, `status` and `report`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runner.cli.options import Number, as_json_option, config_options, load
from runner.errors import UsageError

if TYPE_CHECKING:
    from runner.journal.events import Entry

_WATCH_INTERVAL_S = 2.0
# Time between two updates as a multiple of the time that an update takes.
_WATCH_SHARE = 10
_STATUS_PATIENCE_S = 5.0
_NICENESS = 10
# Kept of a run whose report is served: its curves have no more points.
_MAX_LOGS = 20_000


@click.command()
@config_options
@click.option("--trainer-options", is_flag=True, help="List the options that `trainer:` accepts, with their types.")
def config(trainer_options: bool, **run: Any) -> None:
    """Print the resolved configuration.

    Later sources override earlier ones: defaults, YAML file, environment variables, command line.
    """
    if trainer_options:
        from runner.config import trainer_options as options

        for name, kind in sorted(options.fields().items()):
            if name not in options.RESERVED:
                click.echo(f"{name}: {options.describe(kind)}")
        return
    click.echo(load(run).to_yaml(), nl=False)


@click.command()
@click.argument("location", required=False)
@click.option("--watch", is_flag=True, help="Refresh the status until the run ends; no terminal: a line per change.")
@as_json_option
def status(location: str | None, watch: bool, as_json: bool) -> None:
    """Show the status of a run.

    LOCATION is the folder of the run, or the directory or URL of its checkpoints (default: $OUTPUT_DIR, or the newest
    run in ./runs). The command works on any machine that can read LOCATION. The copy of the journal that is kept with
    the checkpoints is a few seconds old.
    """
    from rich.console import Console
    from rich.live import Live

    from runner.journal.mirror import History
    from runner.journal.summary import summarise
    from runner.ui.status import one_line, panel, runner_is_gone

    where = location if location is not None else newest_run()
    # A person prefers a quick answer to a complete one.
    history = History(where, None if as_json else _STATUS_PATIENCE_S)

    def look() -> tuple[Any, bool, float]:
        """Return the summary, whether the runner is gone, and the CPU seconds that this took."""
        entries, began = history.entries(), time.thread_time()
        gone = runner_is_gone(entries)
        return summarise(entries, now=None if gone else time.time()), gone, time.thread_time() - began

    run, gone, took_s = look()
    if as_json:
        click.echo(json.dumps({**run.to_dict(), "runner_gone": gone}, indent=1))
        return

    def page() -> Any:
        unread = {"out of date": history.unread} if history.unread else {}
        return panel(run, time.time(), {"location": where, **unread}, gone=gone)

    console = Console(highlight=False)
    if not watch:
        console.print(page())
        return
    live = Live(page(), console=console, auto_refresh=False) if console.is_terminal else None
    shown = ""
    # Ctrl-C ends the watching; the run goes on.
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            if live is not None:
                live.update(page(), refresh=True)
            elif (news := one_line(run, gone=gone)) != shown:
                click.echo(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {news}")
                shown = news
            if run.state.is_over or gone:
                break
            time.sleep(max(_WATCH_INTERVAL_S, _WATCH_SHARE * took_s))
            run, gone, took_s = look()


def newest_run() -> str:
    """Return the folder of $OUTPUT_DIR, or of the newest run in ./runs; UsageError if there is none."""
    from runner.journal.journal import JOURNAL_NAME

    if folder := os.environ.get("OUTPUT_DIR"):
        return folder
    written: list[tuple[float, str]] = []
    for journal in Path("runs").glob(f"*/{JOURNAL_NAME}"):
        with contextlib.suppress(OSError):
            written.append((journal.stat().st_mtime, str(journal.parent)))
    if not written:
        raise UsageError("there is no run in ./runs; pass the output_dir of a run, or the location of its checkpoints")
    return max(written)[1]


def entries_at(location: str) -> list[Entry]:
    """Read the journals of a run, with a warning about those that cannot be read."""
    from runner.journal.mirror import History

    history = History(location)
    entries = history.entries()
    if history.unread:
        click.echo(f"runner: warning: some journals could not be read: {history.unread}", err=True)
    return entries


@click.command()
@click.argument("location", required=False)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (default: report.html in the folder of the run, else in the current directory).",
)
@click.option(
    "--price-per-hour",
    type=Number(min=0),
    metavar="PRICE",
    help="On-demand price of one node per hour (default: cost.price_per_hour).",
)
@click.option(
    "--spot-discount",
    type=Number(min=0, max=1, max_open=True),
    metavar="SHARE",
    help="Discount of a spot node, as a share of the price (default: cost.spot_discount).",
)
@click.option("--serve", is_flag=True, help="Serve the report as it is now, on the loopback device, until Ctrl-C.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of --serve (default: one that is free).")
def report(
    location: str | None,
    output: Path | None,
    price_per_hour: float | None,
    spot_discount: float | None,
    serve: bool,
    port: int | None,
) -> None:
    """Write an HTML report of a run, or serve it while the run goes on.

    The report shows the timeline, the losses, the time by cause, the checkpoints and the cost. It is a single file that
    needs no network. LOCATION is the same as for `status`.
    """
    from runner.ui.report import render_page
    from runner.ui.status import runner_is_gone
    from runner.ui.timeline import build_timeline

    if serve and output is not None:
        raise UsageError("--serve writes no file; omit --output")
    if port is not None and not serve:
        raise UsageError("--port needs --serve")
    where = location if location is not None else newest_run()
    if serve:
        _serve(where, port or 0, price_per_hour, spot_discount)
        return
    entries = entries_at(where)
    now = None if runner_is_gone(entries) else time.time()
    page = render_page(build_timeline(entries, now, price_per_hour, spot_discount), where)
    is_run = "://" not in where and (Path(where) / "journal.jsonl").exists()
    output = output or (Path(where) if is_run else Path()) / "report.html"
    output.write_text(page, encoding="utf-8")
    click.echo(f"runner: {output.absolute()}")


def _serve(where: str, port: int, price_per_hour: float | None, spot_discount: float | None) -> None:
    from runner.journal.mirror import History
    from runner.ui import live
    from runner.ui.report import render_page
    from runner.ui.status import runner_is_gone
    from runner.ui.timeline import build_timeline

    history = History(where, _STATUS_PATIENCE_S, _MAX_LOGS)
    history.entries()  # What is no run is refused at once.

    def render(fresh_s: float) -> str:
        entries = history.entries()
        gone = runner_is_gone(entries)
        timeline = build_timeline(entries, None if gone else time.time(), price_per_hour, spot_discount)
        unread = f" (out of date: {history.unread})" if history.unread else ""
        return render_page(timeline, where + unread, gone=gone, live_s=fresh_s)

    # The machine may be the run's: where processor or memory is short, the run goes first.
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(KeyboardInterrupt):
        live.serve(port, render, lambda address: click.echo(f"runner: {address}  (Ctrl-C ends it)"))
