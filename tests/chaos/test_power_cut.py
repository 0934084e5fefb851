"""Power cuts during a write: acknowledged checkpoints survive the restart, and leftovers do no harm.

A real ext4 on a loop device is shut down under the writer, so that what it has not made durable is gone, and mounted
again. The writer is held at a failpoint meanwhile, or the power is cut wherever the writer happens to be.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from contract.support import assert_good_order
from contract.test_crash_points import LOCAL, OPERATIONS, kept_by
from infra.parts import lacks, needs
from integration.support import SHORT_JOB, Run, finished_once, shared_folder, state_hash, wait_until

from checkpointing.commit.catalog import Catalog
from checkpointing.host.failpoints import FAILPOINTS_ENV, HELD
from checkpointing.storage import open_storage

pytestmark = needs("loop devices")

WRITER = Path(__file__).parents[1] / "contract" / "writer.py"
# EXT4_IOC_SHUTDOWN (fs/ext4/ext4.h), and its flag to drop what is not in the journal's committed part.
SHUTDOWN, DROP_ALL = 0x8004587D, 2


class Disk:
    """A file system whose power can fail."""

    def __init__(self, folder: Path) -> None:
        self._image, self.mount = folder / "image", folder / "mount"
        self.mount.mkdir()
        with self._image.open("wb") as file:
            file.truncate(96 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self._image)], check=True, capture_output=True)

    def attach(self) -> bool:
        # A copy each time: who has made a mount namespace meanwhile (another test's `ip netns exec`) holds the file
        # system as it was, shut down, and a mount of the same file would be that one again.
        old, self._image = self._image, self._image.with_name(f"image-{time.monotonic_ns()}")
        subprocess.run(["cp", "--sparse=always", str(old), str(self._image)], check=True)
        old.unlink()
        return (
            subprocess.run(["mount", "-o", "loop", str(self._image), str(self.mount)], capture_output=True).returncode
            == 0
        )

    def cut_power(self) -> None:
        fd = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", DROP_ALL))
        finally:
            os.close(fd)

    def detach(self) -> None:
        subprocess.run(["umount", str(self.mount)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    if not disk.attach():
        lacks("loop devices", "an ext4 image cannot be mounted")
    yield disk
    disk.detach()


def write_until(disk: Disk, failpoints: str, cut_after_s: float | None) -> list[str]:
    """Run the writer until it is held, or for the given time; then cut the power.

    Returns what it had said by then, and what it has begun to remove since.
    """
    log = disk.mount.parent / "said"
    with log.open("w") as output:
        writer = subprocess.Popen(
            [sys.executable, str(WRITER), str(disk.mount / "store"), *OPERATIONS],
            env={**os.environ, FAILPOINTS_ENV: failpoints},
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
    try:
        deadline = time.monotonic() + 120
        if cut_after_s is not None:
            while not log.read_text() and writer.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(cut_after_s)
        else:
            while not stands_still(writer):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        # The output is read first: it was written before the cut.
        lines = log.read_text().splitlines()
        disk.cut_power()
    finally:
        writer.kill()
        writer.wait()
    later = log.read_text().splitlines()[len(lines) :]
    disk.detach()
    assert disk.attach()
    return lines + [line for line in later if line.startswith(("doing remove", "doing aside"))]


def stands_still(writer: subprocess.Popen[bytes]) -> bool:
    """Return whether a thread of a process is held at a failpoint."""
    assert writer.poll() is None, "the writer has ended before it came there"
    names = []
    for path in Path(f"/proc/{writer.pid}/task").glob("*/comm"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            names.append(path.read_text().strip())
    return HELD in names


@pytest.mark.parametrize("point", LOCAL)
def test_at_every_step_of_the_way(point: str, disk: Disk) -> None:
    operation, number = LOCAL[point]
    lines = write_until(disk, f"{point}=hang@{number}", None)
    assert lines[-1] == f"doing {operation}", lines
    assert_good_order(str(disk.mount / "store"), kept_by(lines))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.soak] if seed > 1 else []) for seed in range(12)]
)
def test_at_any_moment(seed: int, disk: Disk) -> None:
    lines = write_until(disk, "", random.Random(seed).uniform(0, 0.25))
    assert_good_order(str(disk.mount / "store"), kept_by(lines))


@pytest.mark.soak
@pytest.mark.parametrize("cuts", [1, 3])
def test_under_a_job(cuts: int, disk: Disk, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Checkpoints and journal are on the disk; after the restart, the same command resumes."""
    calm = finished_once(shared_folder(tmp_path_factory) / "untouched", *SHORT_JOB)
    run = Run(disk.mount / "run", *SHORT_JOB)
    run.start()
    # Cached data is not durable by then; the run's id is.
    wait_until(run, lambda: run.events("rank_started"))
    fail(disk, run)
    for number in range(cuts):
        before = len(run.events("committed"))
        run.start()
        wait_for_more(run, before)
        time.sleep(random.Random(number).uniform(0, 0.3))
        acknowledged = max(event["step"] for event in run.events("committed"))
        fail(disk, run)
        assert max(Catalog(open_storage(str(run.folder / "checkpoints"))).committed_steps()) >= acknowledged
    assert run.start().finish() == 0, run.output
    assert state_hash(run.checkpoint(60)) == state_hash(calm.checkpoint(60))


def wait_for_more(run: Run, commits: int) -> None:
    """Wait for more commits, or for the end of a run that finished."""
    process = run.process
    assert process is not None
    wait_until(run, lambda: len(run.events("committed")) > commits or process.poll() == 0)


def fail(disk: Disk, run: Run) -> None:
    """Cut the power: the whole machine stops, and boots again."""
    assert run.process is not None
    run_id = run.run_id()
    disk.cut_power()
    run.process.kill()
    # Processes that are forked in the meantime, too: any process with an open file there keeps the file system busy.
    while processes := run.processes(run_id):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1)
    run.finish()
    disk.detach()
    assert disk.attach()
