from __future__ import annotations

import os
import signal
from pathlib import Path

from checkpointing.host.heartbeat import CommitReport, ControlPage, Heartbeat, Phase
from checkpointing.host.shared_memory import SharedMemory


def test_a_heartbeat_is_never_seen_half_written() -> None:
    """Another process writes without a pause; of 200,000 looks none sees a field that is neither old nor new."""
    page = ControlPage.create(1)
    page.write(0, Heartbeat(Phase.TRAINING, 1, 1.0, 1, 1.0, 1.0, 1))
    page.last_commit = CommitReport(1, 1.0, 1.0)
    us, writer = os.getpid(), os.fork()
    if writer == 0:
        number = 1
        while os.getppid() == us:
            # Every byte of the whole numbers changes with the last: half of one is far off.
            number = 1 if number != 1 else 0x0101_0101_0101_0101
            page.write(0, Heartbeat(Phase.TRAINING, number, 1.0, number, 1.0, 1.0, number))
            page.last_commit = CommitReport(number, 1.0, 1.0)
        os._exit(0)
    try:
        looks, changes, before = 0, 0, 1
        while looks < 200_000 or changes < 100:
            beat, commit = page.read(0), page.last_commit
            looks, changes, before = looks + 1, changes + (beat.step != before), beat.step
            assert {beat.step, beat.start_step, beat.beats, commit.step} <= {1, 0x0101_0101_0101_0101}
            assert beat.time == beat.start_time == beat.step_s == commit.duration_s == commit.cpu_s == 1.0
            assert beat.phase is Phase.TRAINING
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        page.close()


def test_an_arena_is_in_no_core_file() -> None:
    """As proc(5) has it, `dd`: an aborted rank would write a copy of the model before it is dead."""
    memory = SharedMemory.create("arena", 1 << 20)
    try:
        _, _, maps = Path("/proc/self/smaps").read_text().partition(f"{memory.address:x}-")
        flags = next(line for line in maps.splitlines() if line.startswith("VmFlags:"))
        assert " dd" in flags
    finally:
        memory.close()


def test_memory_that_another_process_wrote_is_mapped_at_once() -> None:
    made = SharedMemory.create("arena", 200 << 20)
    memory = SharedMemory.attach(os.dup(made.fd))
    try:
        memory.populate()
        _, _, maps = Path("/proc/self/smaps").read_text().partition(f"{memory.address:x}-")
        resident = next(line for line in maps.splitlines() if line.startswith("Rss:"))
        assert int(resident.split()[1]) * 1024 == memory.nbytes
    finally:
        memory.close()
        made.close()
