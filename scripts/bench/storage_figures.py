"""Figures and tables of `storage.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import spread
from storage_server import FAR_CORE

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


@dataclass
class Measured:
    """All that was measured, by rounds.

    Attributes:
        upload_s: Seconds of an upload, by method.
        uploaded_bytes: Of one upload.
        extra_bytes: Memory that an upload of ours took at its peak.
        steps: Result of `StorageRuns.steps`, by the agent's core.
        resume_s: Seconds of a resume.
        download_s: Seconds of a plain download of the same checkpoint.
        checkpoint_bytes: Its size.
    """

    uploaded_bytes: int = 0
    upload_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in UPLOADS})
    extra_bytes: list[int] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    resume_s: list[float] = field(default_factory=list)
    download_s: list[float] = field(default_factory=list)
    checkpoint_bytes: int = 0


def figures_of(measured: Measured) -> dict[str, float]:
    """Return the ratios with a bar, each the median of what was measured side by side, and the worst of the resumes.

    Those of uploads are left out where only resumes were measured.
    """
    ours, best = measured.upload_s["ours"], measured.upload_s["best"]
    clis = [measured.upload_s[name] for name in _CLIS if measured.upload_s[name]]
    resumes = [resume / download for resume, download in zip(measured.resume_s, measured.download_s, strict=True)]
    figures: dict[str, float] = {}
    if ours:
        figures = {
            "upload_vs_cli": statistics.median(min(theirs) / mine for mine, *theirs in zip(ours, *clis, strict=True)),
            "upload_vs_best": statistics.median(theirs / mine for mine, theirs in zip(ours, best, strict=True)),
            "upload_extra_mb": max(measured.extra_bytes) / 1e6,
        }
    figures |= {"resume_vs_download": statistics.median(resumes), "resume_vs_download_worst": max(resumes)}
    if measured.steps:
        pairs = measured.steps[FAR_CORE]["pairs"]
        figures["slow_link_step_ratio"] = statistics.median(saving / plain for saving, plain in pairs)
    return figures


def table_of(measured: Measured, figures: Mapping[str, float]) -> str:
    """Return a Markdown table: each figure with its bar and the absolute values that it comes from."""

    def rate(nbytes: int, seconds: Sequence[float]) -> str:
        return spread([nbytes / each / 1e6 for each in seconds], 0)

    uploads = {name: rate(measured.uploaded_bytes, each) for name, each in measured.upload_s.items() if each}
    uploads = {name: uploads.get(name, "-") for name in measured.upload_s}
    behind = {
        "upload_vs_cli": f"MB/s: ours {uploads['ours']}, aws {uploads['aws']}, rclone {uploads['rclone']}",
        "upload_vs_best": f"MB/s: ours {uploads['ours']}, boto3 {uploads['best']}",
        "upload_extra_mb": "all of the process's anonymous memory, at its peak",
        "resume_vs_download": f"MB/s: resume {rate(measured.checkpoint_bytes, measured.resume_s)}, download "
        f"{rate(measured.checkpoint_bytes, measured.download_s)}",
        "resume_vs_download_worst": f"of {len(measured.resume_s)} pairs in turns",
    }
    if measured.steps:
        far = measured.steps[FAR_CORE]
        ratios = {core: [saving / plain for saving, plain in each["pairs"]] for core, each in measured.steps.items()}
        behind["slow_link_step_ratio"] = (
            f"{spread(ratios[FAR_CORE], 3)} of {len(far['pairs'])} pairs; a step takes "
            f"{spread([plain for _, plain in far['pairs']])} s, a save {spread(far['save_s'], 1)} s; with the agent on "
            f"training's own core {spread(ratios.get(0, []), 3)}"
        )
    lines = ["| figure | measured | bar | | behind it: median (quartiles) |", "|---|---|---|---|---|"]
    for name, value in figures.items():
        sign, bar = BARS[name]
        verdict = "PASS" if (value >= bar if sign == "≥" else value <= bar) else "MISS"
        lines.append(f"| `{name}` | {value:.4g} | {sign} {bar:g} | {verdict} | {behind[name]} |")
    return "\n".join(lines)
