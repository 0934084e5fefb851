"""Figures, table and plot of `checkpoint.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import spread

TITLES = {
    "none": "none",
    "hf": "HF Trainer, synchronous",
    "dcp-thread": "DCP async, thread",
    "dcp-process": "DCP async, process",
    "dcp-shm": "DCP async, process, shared stager",
    "dcp-shm-async": "DCP async, process, async shared stager",
    "dlrover": "DLRover Flash Checkpoint 0.6.1",
    "ours": "ours",
}
PEERS = [name for name in TITLES if name not in ("none", "ours")]
MODES = {"spare": "a core to spare", "pinned": "all on one core"}


@dataclass
class Series:
    """What was measured of one variant in one mode, over all rounds."""

    blocked_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


@dataclass
class Measured:
    """All that was measured.

    Attributes:
        series: By mode and variant.
        dd_s: Seconds of `dd` for a state's bytes, with fdatasync and with O_DIRECT.
        resumes: Seconds of a resume from memory and from the disk.
        slow: Seconds of a step with saves to a slow disk, and without.
        state_bytes: Weights and optimizer state.
    """

    series: dict[str, dict[str, Series]] = field(
        default_factory=lambda: {mode: {method: Series() for method in TITLES} for mode in MODES}
    )
    dd_s: dict[str, list[float]] = field(default_factory=lambda: {"fdatasync": [], "direct": []})
    resumes: list[tuple[float, float]] = field(default_factory=list)
    slow: list[tuple[float, float]] = field(default_factory=list)
    state_bytes: int = 0


def figures_of(measured: Measured) -> dict[str, float]:
    """Return the ratios with a bar; below one is in our favour, except for `ram_resume_speedup`."""

    def median(mode: str, method: str, what: str) -> float:
        values = getattr(measured.series[mode][method], what)
        return statistics.median(values) if values else float("nan")

    def against(mode: str, what: str) -> tuple[float, float]:
        ours = median(mode, "ours", what)
        best = min(median(mode, peer, what) for peer in PEERS if getattr(measured.series[mode][peer], what))
        return ours / median(mode, "hf", what), ours / best

    blocked_hf, blocked_best = against("spare", "blocked_s")
    overhead_hf, overhead_best = against("pinned", "overhead_s")
    durable = median("spare", "ours", "durable_s")
    extra = median("spare", "ours", "peak_bytes") - median("spare", "none", "peak_bytes")
    figures = {
        "blocked_vs_hf": blocked_hf,
        "blocked_vs_best_peer": blocked_best,
        "overhead_vs_hf": overhead_hf,
        "overhead_vs_best_peer": overhead_best,
        "durable_vs_dd": durable / statistics.median(measured.dd_s["fdatasync"]),
        "durable_vs_direct": durable / statistics.median(measured.dd_s["direct"]),
        "peak_extra_mb": extra / 1e6,
        "peak_extra_vs_two_states": extra / (2 * measured.state_bytes),
        **resume_figures(measured.resumes),
    }
    if measured.slow:
        figures["slow_disk_step_ratio"] = statistics.median(saving / plain for saving, plain in measured.slow)
    return figures


def resume_figures(resumes: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return how many times as quick a resume from memory is as one from the disk: in the median, and at worst."""
    ratios = [disk / memory for memory, disk in resumes]
    return {"ram_resume_speedup": statistics.median(ratios), "ram_resume_speedup_worst": min(ratios)}


def table_of(measured: Measured) -> str:
    """Return a Markdown table with one row per variant: medians with quartiles, per save."""
    lines = [
        "| | blocked s | overhead s, a core to spare | overhead s, all on one core | durable s | peak memory GB |",
        "|---|---|---|---|---|---|",
    ]
    for method, title in TITLES.items():
        spare, pinned = measured.series["spare"][method], measured.series["pinned"][method]
        if not spare.peak_bytes:
            continue
        cells = [
            spread(spare.blocked_s, 4 if method == "ours" else 2),
            spread(spare.overhead_s) if method != "none" else "-",
            spread(pinned.overhead_s) if method != "none" else "-",
            spread(spare.durable_s),
            f"{statistics.median(spare.peak_bytes) / 1e9:.2f}",
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(measured: Measured, path: Path) -> None:
    """Draw blocked time (logarithmic) and overhead per save as bars."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "bench"
    from matplotlib import pyplot

    methods = [*PEERS, "ours"]
    names = [TITLES[method] for method in methods]
    colours = ["#8a8f98"] * len(PEERS) + ["#1f77b4"]
    panels = [("spare", "blocked_s", "blocked s per save"), ("pinned", "overhead_s", "overhead s per save, one core")]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    for axis, (mode, what, label) in zip(axes, panels, strict=True):
        values = [statistics.median(getattr(measured.series[mode][method], what) or [0.0]) for method in methods]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xscale("log")
    axes[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})
