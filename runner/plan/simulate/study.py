"""Several scenarios compared: what goodput depends on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.errors import UsageError
from runner.journal.events import Entry
from runner.plan.simulate.engine import Forecast, forecast
from runner.plan.simulate.scenario import HOUR_S, Scenario, learn
from runner.system.text import choice_of, duration

_MAX_VARIATIONS = 200
# Of Okabe and Ito.
_LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Names until version 0.1, which are still accepted.
_FORMER_NAMES = {"machine_share": "node_loss_share", "machine_wait_s": "node_wait_s"}


@dataclass(frozen=True)
class Study:
    """A scenario and its variations."""

    scenario: Scenario
    variations: list[dict[str, float]]  # Changed values by name, one mapping per scenario to simulate.
    runs: int  # Simulated runs per scenario.
    seed: int  # Of all of them.
    trace_s: Sequence[float] | None = None  # Seconds between failures, instead of an exponential distribution.

    @cached_property
    def forecasts(self) -> list[Forecast]:
        """One forecast per variation."""
        return [
            forecast(self.scenario.with_(**changes), self.runs, self.seed, self.trace_s) for changes in self.variations
        ]

    def of_paid_nodes(self, changes: dict[str, float], seen: Forecast) -> float:
        """Return a variation's goodput as a share of all nodes that are paid for, the spares included."""
        varied = self.scenario.with_(**changes)
        return seen.goodput * varied.nodes / (varied.nodes + varied.spares)

    def to_dict(self, target: float | None) -> dict[str, Any]:
        """Return what `runner simulate --json` prints."""
        found = [
            {
                "changes": changes,
                **asdict(seen),
                "goodput_of_paid_nodes": self.of_paid_nodes(changes, seen),
                **({"reaches_target": seen.low >= target} if target is not None else {}),
            }
            for changes, seen in zip(self.variations, self.forecasts, strict=True)
        ]
        # JSON has no infinity.
        scenario = {name: value if math.isfinite(value) else None for name, value in asdict(self.scenario).items()}
        return {"scenario": scenario, "forecasts": found}


def scenario_of(
    entries: Sequence[Entry],
    work_hours: float,
    mttf_hours: float | None,
    reclaims_per_day: float,
    settings: Sequence[str],
) -> Scenario:
    """Build the scenario of a command line, with the durations of a run's journal, if there is one.

    The settings, NAME=SECONDS of each `--set`, take precedence over the journal.

    Raises:
        UsageError: A name is unknown, or a value is out of range.
    """
    base = Scenario(
        work_s=work_hours * HOUR_S,
        mttf_s=mttf_hours * HOUR_S if mttf_hours is not None else math.inf,
        reclaim_s=24 * HOUR_S / reclaims_per_day if reclaims_per_day else math.inf,
    )
    scenario = learn(entries, base) if entries else base
    pairs = [text.partition("=") for text in settings]
    changes = {name: _number(f"--set {text}", value) for text, (name, _, value) in zip(settings, pairs, strict=True)}
    return _changed(scenario, changes, " ".join(f"--set {text}" for text in settings)) if changes else scenario


def variations(vary: Sequence[str], scenario: Scenario) -> list[dict[str, float]]:
    """Return all combinations of what each `--vary NAME=A,B,…` lists; without it, one empty variation.

    Raises:
        UsageError: A name is unknown, a value is out of range, or there are too many combinations.
    """
    names, values = [], []
    for text in vary:
        name, _, listed = text.partition("=")
        name = _FORMER_NAMES.get(name, name)
        numbers = [_number(f"--vary {text}", part) for part in listed.split(",")]
        for number in numbers:
            _changed(scenario, {name: number}, f"--vary {text}")
        names.append(name)
        values.append(numbers)
    combined = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]
    if len(combined) > _MAX_VARIATIONS:
        raise UsageError(f"--vary: {len(combined)} combinations exceed {_MAX_VARIATIONS}; list fewer values")
    return combined


def choices(scenario: Scenario) -> list[dict[str, float]]:
    """Return what to do about lost nodes, as variations: wait for replacements, continue on fewer, or have spares.

    Raises:
        UsageError: It has one node, or may not have fewer.
    """
    if scenario.nodes < 2:
        raise UsageError("--choices compares what several nodes can do; pass --nnodes MIN:MAX")
    if scenario.min_nodes == scenario.nodes:
        raise UsageError("--choices needs to know with how few nodes the run may continue; pass --nnodes MIN:MAX")
    spares = scenario.spares or 1
    fixed, elastic = {"min_nodes": scenario.nodes}, {"min_nodes": scenario.min_nodes}
    return [
        {**fixed, "spares": 0},
        {**elastic, "spares": 0},
        {**fixed, "spares": spares},
        {**elastic, "spares": spares},
    ]


def read_trace(path: Path) -> list[float]:
    """Return the seconds between failures, of a file with the hours, one number per line.

    Raises:
        UsageError: The file cannot be read, or a line is not a number above 0.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"--trace {path}: {why}; give a file with hours between failures, one per line") from None
    gaps = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            gaps.append(_number(f"--trace {path}, line {number}", line.strip()) * HOUR_S)
            if not gaps[-1] > 0:
                raise UsageError(
                    f"--trace {path}, line {number}: {line.strip()!r} is not above 0; write hours, for example 12.5"
                )
    if not gaps:
        raise UsageError(f"--trace {path}: empty; write hours between failures, one number per line")
    return gaps


def render(study: Study, target: float | None) -> RenderableType:
    """Return the forecasts as a table, and the time by cause of the first one."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = list(study.variations[0])
    has_spares = study.scenario.spares or any("spares" in changes for changes in study.variations)
    paid = ["of paid nodes"] if has_spares else []
    for name in (*names, "goodput", *paid, "5-95 % of runs", "wall time", "failures"):
        table.add_column(name, justify="right", no_wrap=True)
    if target is not None:
        table.add_column(f">= {100 * target:g} %", justify="right", no_wrap=True)
    for changes, seen in zip(study.variations, study.forecasts, strict=True):
        row = [f"{changes[name]:g}" for name in names]
        row += [
            f"{100 * seen.goodput:.2f} ± {100 * (seen.high - seen.goodput):.2f} %",
            *([f"{100 * study.of_paid_nodes(changes, seen):.2f} %"] if has_spares else []),
            f"{100 * seen.percentile_5:.2f}-{100 * seen.percentile_95:.2f} %"
            if seen.finished == 1
            else "some never end",
            duration(seen.wall_s),
            f"{seen.interruptions:.1f}",
        ]
        if target is not None:
            row.append("yes" if seen.low >= target else "no")
        table.add_row(*row)
    first = study.forecasts[0]
    causes = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    causes.add_column("where the time goes" + (" (first line)" if len(study.variations) > 1 else ""))
    causes.add_column("", justify="right")
    causes.add_column("", justify="right")
    for cause, seconds in sorted(first.seconds.items(), key=lambda item: -item[1]):
        if seconds > 0:
            causes.add_row(cause, duration(seconds), f"{100 * seconds / first.wall_s:.2f} %")
    quiet = math.isinf(study.scenario.mttf_s) and math.isinf(study.scenario.reclaim_s) and study.trace_s is None
    if quiet and not any("mttf_s" in changes or "reclaim_s" in changes for changes in study.variations):
        causes.caption = "no failures are simulated; pass --mttf-hours, --gpus, --trace or --reclaims-per-day"
    note = f"{study.runs} runs each, seed {study.seed}; ±: 95 % confidence interval of the mean"
    return Group(table, Text(), causes, Text(note, "dim"))


def to_page(study: Study) -> str:
    """Return an HTML page that plots goodput over the first name that varies, with a line per other combination."""
    from runner.ui import web_page
    from runner.ui.drawing import Line, LineChart

    names = list(study.variations[0])
    lines: dict[str, list[tuple[float, Forecast]]] = {}
    for changes, seen in zip(study.variations, study.forecasts, strict=True):
        label = ", ".join(f"{name}={changes[name]:g}" for name in names[1:]) or "goodput"
        lines.setdefault(label, []).append((changes[names[0]], seen))
    drawn = []
    for (label, points), colour in zip(lines.items(), itertools.cycle(_LINE_COLOURS), strict=False):
        points.sort(key=lambda point: point[0])
        intervals = [(value, 100 * seen.low, 100 * seen.high) for value, seen in points]
        percentages = [(value, 100 * seen.goodput) for value, seen in points]
        drawn.append(Line(label, colour, [("", percentages)], intervals=intervals))
    x_log = all(changes[names[0]] > 0 for changes in study.variations)
    chart = LineChart(drawn, names[0], "goodput, %", x_log=x_log)
    return web_page.chart("Goodput of simulated runs, with the 95 % confidence interval of the mean", chart)


def _changed(scenario: Scenario, changes: dict[str, float], written: str) -> Scenario:
    changes = {_FORMER_NAMES.get(name, name): value for name, value in changes.items()}
    for name in changes:
        if name not in vars(scenario):
            raise UsageError(
                f"{written}: {name!r} is unknown; {choice_of(vars(scenario), name, 'see runner simulate --list')}"
            )
    try:
        return scenario.with_(**changes)
    except ValueError as error:
        raise UsageError(f"{written}: {error}") from None


def _number(written: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UsageError(f"{written}: {text!r} is not a number; write for example 12.5")
    return value
