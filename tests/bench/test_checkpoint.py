from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from bench.support import all_finite, smoke
from library.agent import MonitoredAgent

FIGURES = {
    "blocked_vs_hf",
    "blocked_vs_best_peer",
    "overhead_vs_hf",
    "overhead_vs_best_peer",
    "durable_vs_dd",
    "durable_vs_direct",
    "peak_extra_mb",
    "peak_extra_vs_two_states",
    "ram_resume_speedup",
    "ram_resume_speedup_worst",
}


def test_an_agent_that_was_killed_is_closed_without_an_error(tmp_path: Path) -> None:
    """The stage with a slow disk kills its agent, whose commits would disturb the next run."""
    with MonitoredAgent(str(tmp_path)) as agent:
        agent.kill()


@pytest.mark.soak
def test_only_resumes(tmp_path: Path) -> None:
    figures, output = smoke("checkpoint", tmp_path, "--smoke", "--resumes", "2")
    assert figures.keys() == {"ram_resume_speedup", "ram_resume_speedup_worst"} and all_finite(figures)
    assert output.count("resume from memory") == 2 and "blocked" not in output


@pytest.mark.soak
def test_every_stage(tmp_path: Path) -> None:
    pages = ["--docs", str(tmp_path)] if importlib.util.find_spec("matplotlib") else []
    figures, output = smoke("checkpoint", tmp_path, "--smoke", *pages)
    assert figures.keys() - {"slow_disk_step_ratio"} == FIGURES and all_finite(figures)
    # Without the kernel's throttle there is no such ratio, and a line says so.
    assert ("slow_disk_step_ratio" in figures) != ("slow disk: left out" in output)
    for row in ("| none |", "| HF Trainer", "| DCP async, process, async", "| ours |"):
        assert row in output
    if pages:
        assert "checkpoint.svg" in (tmp_path / "checkpoint.md").read_text()
