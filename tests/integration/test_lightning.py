"""Lightning jobs, killed in the middle of an epoch, at its end and while they validate, end as untouched ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from infra.torchrun import Ended, torchrun

JOB = Path(__file__).with_name("lightning_job.py")


def run(folder: Path, trouble: str, options: str, ranks: int = 1) -> Ended:
    return torchrun(JOB, folder, trouble, *options.split(), ranks=ranks, alone=ranks == 1)


def result(folder: Path, options: str, ranks: int = 1) -> dict[str, Any]:
    done = run(folder, "-", options, ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = done.printed()
    return found


# An epoch has 9 batches; with two ranks 5.
SOAK = [
    ("workers", 1, [9, 10, 18]),
    ("accumulate", 1, [3, 5, 10]),
    ("plateau", 1, [8, 9, 20]),
    ("limit validate", 1, [6, 7]),
    ("early", 1, [9, 13, 27]),
    # The last step: what is started again has nothing to do.
    ("", 1, [36]),
    ("manual", 1, [10, 18, 24]),
    ("average", 1, [5, 9, 12]),
    ("stream", 1, [4, 9, 11]),
    ("", 2, [4, 5, 12]),
    ("fsdp", 2, [5, 9]),
]


@pytest.mark.parametrize(
    ("options", "ranks", "kills"),
    [
        ("plateau validate accumulate workers", 1, [10]),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in SOAK),
    ],
)
def test_a_killed_job_ends_as_if_nothing_had_happened(
    options: str, ranks: int, kills: list[int], tmp_path: Path
) -> None:
    expected = result(tmp_path / "calm", options, ranks)
    assert len(expected["epochs"]) > 1
    for step in kills:
        assert run(tmp_path / "killed", f"SIGKILL@{step}", options, ranks).returncode != 0
    assert result(tmp_path / "killed", options, ranks) == expected


@pytest.mark.soak
def test_a_notice_of_preemption_is_answered_with_a_checkpoint(tmp_path: Path) -> None:
    expected = result(tmp_path / "calm", "")
    noticed = run(tmp_path / "stopped", "SIGTERM@5", "")
    assert noticed.codes == (75,), noticed.stderr
    newest = max(int(path.name.split("-")[1]) for path in (tmp_path / "stopped" / "checkpoints").glob("checkpoint-*"))
    assert 5 <= newest < 36
    assert result(tmp_path / "stopped", "") == expected
