"""A program that saves by `torch.distributed.checkpoint`, unedited: killed, damaged, and compared with torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.small_dcp import spoil
from integration.support import Run, wait_until

from checkpointing.agent.events import CheckpointQuarantined, Resumed
from checkpointing.dcp.folders import open_folder
from checkpointing.host.failpoints import FAILPOINTS_ENV, ONCE_ENV
from runner.journal.events import NothingSaved, ProgramSaved

PROGRAM = Path(__file__).with_name("dcp_program.py")


def stock(folder: Path, ranks: int, steps: int = 20) -> str:
    """Run it by torchrun; return its digest."""
    folder.mkdir()
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*launch, str(PROGRAM), "ck", str(steps)], cwd=folder, env=environment, check=True, capture_output=True
    )
    return (folder / "ck.digest").read_text()


def ours(folder: Path, ranks: int, *args: str, steps: int = 20, armed: str = "") -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "fired").mkdir(exist_ok=True)
    variables = {FAILPOINTS_ENV: armed, ONCE_ENV: str(folder / "fired"), "OMP_NUM_THREADS": "1"}
    run = Run(
        folder / "run", "--nproc-per-node", str(ranks), script=[str(PROGRAM), str(folder / "ck"), str(steps), *args]
    )
    assert run.start(**variables).finish() == 0, run.output
    return run


@pytest.mark.parametrize(
    ("ranks", "args", "armed"),
    [
        (1, (), "dcp.written=kill@2"),
        (2, ("async",), "dcp.publishing=kill@2; dcp.published=kill@3"),
        (3, (), "dcp.published=kill@2"),
    ],
)
def test_a_killed_program_ends_with_the_same_bits(
    ranks: int, args: tuple[str, ...], armed: str, tmp_path: Path
) -> None:
    expected = stock(tmp_path / "stock", ranks)
    run = ours(tmp_path / "ours", ranks, *args, armed=armed)
    assert (tmp_path / "ours" / "ck.digest").read_text() == expected
    assert len(list((tmp_path / "ours" / "fired").iterdir())) == armed.count("kill")
    # A rank that is killed when it has committed has not said so.
    steps = {one["step"] for name in (ProgramSaved.name, Resumed.name) for one in run.events(name)}
    assert steps >= {10, 20} and run.events(Resumed.name)
    assert not run.events(NothingSaved.name)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path: Path) -> None:
    expected = stock(tmp_path / "stock", 2)
    folder = tmp_path / "ours"
    (folder / "fired").mkdir(parents=True)
    command = [str(PROGRAM), str(folder / "ck"), "20"]
    first = Run(folder / "run", "--nproc-per-node", "2", script=command)
    # It stands still once step 15 is published.
    first.start(**{FAILPOINTS_ENV: "dcp.published=hang@3", ONCE_ENV: str(folder / "fired"), "OMP_NUM_THREADS": "1"})
    wait_until(first, lambda: bool(list((folder / "fired").iterdir())))
    first.signal(signal.SIGKILL)
    first.finish()
    spoil(open_folder(folder / "ck" / "step-15"), "flipped")
    run = Run(folder / "run", "--nproc-per-node", "2", script=command)
    assert run.start(OMP_NUM_THREADS="1").finish() == 0, run.output
    assert (folder / "ck.digest").read_text() == expected
    [found] = run.events(CheckpointQuarantined.name)
    assert "was altered" in found["reason"] and Path(found["kept_as"]).is_dir()
    assert [one["step"] for one in run.events(Resumed.name)] == [10]


def test_without_a_supervisor_one_line_commits(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    imports = "from __future__ import annotations\n"
    program.write_text(
        PROGRAM.read_text().replace(imports, f"{imports}\nfrom checkpointing.dcp import protect\nprotect()\n")
    )
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run(
        [*launch, str(program), "ck", "5"], cwd=tmp_path, check=True, capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert len(open_folder(tmp_path / "ck" / "step-5").published().manifest.files) == 3
