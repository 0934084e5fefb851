"""Figures of what was measured, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from library.figures import Samples, bar_table, ratios, spread

UPLOADS = {"ours": "ours", "aws": "aws s3 cp", "rclone": "rclone copy", "best": "boto3, tuned"}
_CLIS = ("aws", "rclone")
BARS = {
    "upload_vs_cli": ("≥", 1.8),
    "upload_vs_best": ("≥", 0.9),
    "upload_extra_mb": ("≤", 256.0),
    "slow_link_step_ratio": ("≤", 1.02),
    "resume_vs_download": ("≤", 1.3),
    "resume_vs_download_worst": ("≤", 1.3),
}
# Where the agent runs while training is on core 0, and the names of these two samples.
FAR, NEAR = "far", "near"


def step_ratios(measured: Samples, core: str) -> list[float]:
    return ratios(measured["saving_step_s", core], measured["plain_step_s", core])


def figures_of(measured: Samples) -> dict[str, float]:
    """Return the ratios with a bar, each the median of what was measured side by side; those that were measured."""
    ours = measured["upload_s", "ours"]
    clis = [measured["upload_s", name] for name in _CLIS if measured["upload_s", name]]
    resumes = ratios(measured["resume_s", "ours"], measured["resume_s", "download"])
    figures: dict[str, float] = {}
    if ours:
        figures = {
            "upload_vs_cli": statistics.median(ratios(map(min, zip(*clis, strict=True)), ours)),
            "upload_vs_best": statistics.median(ratios(measured["upload_s", "best"], ours)),
            "upload_extra_mb": max(measured["bytes", "extra"]) / 1e6,
        }
    figures |= {"resume_vs_download": statistics.median(resumes), "resume_vs_download_worst": max(resumes)}
    if steps := step_ratios(measured, FAR):
        figures["slow_link_step_ratio"] = statistics.median(steps)
    return figures


def table_of(measured: Samples, figures: Mapping[str, float]) -> str:
    """Return a Markdown table: each figure with its bar and the absolute values that it comes from."""

    def rate(what: str, seconds: Sequence[float]) -> str:
        return spread([measured["bytes", what][0] / each / 1e6 for each in seconds], 0)

    uploads = {name: rate("uploaded", measured["upload_s", name]) for name in UPLOADS}
    resume, download = (rate("checkpoint", measured["resume_s", name]) for name in ("ours", "download"))
    steps = step_ratios(measured, FAR)
    behind = {
        "upload_vs_cli": f"MB/s: ours {uploads['ours']}, aws {uploads['aws']}, rclone {uploads['rclone']}",
        "upload_vs_best": f"MB/s: ours {uploads['ours']}, boto3 {uploads['best']}",
        "upload_extra_mb": "all of the process's anonymous memory, at its peak",
        "resume_vs_download": f"MB/s: resume {resume}, download {download}",
        "resume_vs_download_worst": f"of {len(measured['resume_s', 'ours'])} pairs in turns",
        "slow_link_step_ratio": f"{spread(steps, 3)} of {len(steps)} pairs; a step takes "
        f"{spread(measured['plain_step_s', FAR])} s, a save {spread(measured['save_s', FAR], 1)} s; with the agent on "
        f"training's own core {spread(step_ratios(measured, NEAR), 3)}",
    }
    return bar_table(figures, BARS, behind)
