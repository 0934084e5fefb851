"""The terminal: streams whose errors end nothing, and the ranks' output."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
import time
from pathlib import Path

import pytest

from runner.ranks import output
from runner.ranks.output import STDERR_NAME, STDOUT_NAME, OutputRelay, drain_streams, make_streams_lossy


def test_characters_that_the_encoding_lacks_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "output"
    with path.open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        make_streams_lossy()
        assert sys.stdout is not file
        print("50 % → Ω")
        assert path.read_text() == "50 % ? ?\n"


def test_a_closed_pipe_ends_nothing() -> None:
    saved = sys.stdout
    reader, writer = os.pipe()
    os.close(reader)
    try:
        sys.stdout = io.TextIOWrapper(os.fdopen(writer, "wb", buffering=0, closefd=False), encoding="utf-8")
        make_streams_lossy()
        print("lost")
        sys.stdout.flush()
    finally:
        sys.stdout = saved
        os.close(writer)


def test_a_full_disk_is_pointed_out_once(capfd: pytest.CaptureFixture[str]) -> None:
    """On standard error, when standard output (descriptor 1) is refused."""
    kept, full, stream = os.dup(1), os.open("/dev/full", os.O_WRONLY), sys.stdout
    try:
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
        os.dup2(full, 1)
        make_streams_lossy()
        for _ in range(3):
            print("lost", flush=True)
    finally:
        os.dup2(kept, 1)
        sys.stdout = stream
        os.close(full)
        os.close(kept)
    assert capfd.readouterr().err == "runner: warning: cannot write standard output: No space left on device\n"


def test_a_terminal_that_is_stopped_delays_nothing_and_gets_all_of_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S, a session that hangs, or `| less`: the runner must answer a preemption notice meanwhile."""
    saved, (reader, writer) = sys.stdout, os.pipe()
    lines = [f"line {number} " + "x" * 500 for number in range(1000)]
    try:
        monkeypatch.setattr(output, "_queues", [])
        sys.stdout = io.TextIOWrapper(os.fdopen(writer, "wb", buffering=0, closefd=False), encoding="utf-8")
        make_streams_lossy()
        # More than a pipe holds. A writer that waits would wait for good.
        for line in lines:
            print(line)
        monkeypatch.setattr("runner.ranks.output._PATIENCE_S", 0.01)
        drain_streams()
        received = b""
        while received.count(b"\n") < len(lines):
            received += os.read(reader, 1 << 20)
        assert received.decode().splitlines() == lines
        # Idle again: what is printed is there at once.
        drain_streams()
        print("now")
        assert os.read(reader, 100) == b"now\n"
        # What nobody takes is bounded.
        for _ in range(4000):
            print("y" * 500)
        assert 0 < output._queues[0].nbytes <= 1 << 20
    finally:
        sys.stdout = saved
        os.close(reader)


def test_a_terminal_whose_session_hangs_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it takes something until it is full to the last byte, and then keeps a line that does not fit."""
    saved, (master, slave) = sys.stdout, pty.openpty()
    try:
        monkeypatch.setattr(output, "_queues", [])
        sys.stdout = io.TextIOWrapper(os.fdopen(slave, "wb", buffering=0, closefd=False), encoding="utf-8")
        make_streams_lossy()
        # A writer that waits would wait for good.
        for number in range(500):
            print(f"line {number} " + "x" * 70)
        monkeypatch.setattr("runner.ranks.output._PATIENCE_S", 0.01)
        drain_streams()
        received = b""
        while received.count(b"\n") < 500:
            received += os.read(master, 1 << 16)
        assert received.splitlines()[-1].startswith(b"line 499 ")
        # The ranks' output waits for it, but not for longer than it takes.
        began = time.monotonic()
        written = 0

        def write(_: int, data: bytes, source: object) -> None:
            nonlocal written
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            written += os.read(master, 1 << 16).count(b"\n")

        relay = OutputRelay(write)
        for rank in range(8):
            folder = tmp_path / str(rank)
            folder.mkdir()
            for name in (STDOUT_NAME, STDERR_NAME):
                (folder / name).write_text("the last line\n")
            relay.follow(folder)
        monkeypatch.setattr("runner.ranks.output._PATIENCE_S", 5.0)
        relay.finish()
        assert written == 16 and time.monotonic() - began < 1.0
    finally:
        sys.stdout = saved
        os.close(master)
        os.close(slave)


def test_streams_of_a_test_or_closed_ones_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    monkeypatch.setattr(sys, "stderr", None)
    make_streams_lossy()
    assert sys.stdout is own and sys.stderr is None


def test_output_is_copied_byte_for_byte_also_what_comes_last(tmp_path: Path) -> None:
    written: dict[int, bytes] = {1: b"", 2: b""}
    seen = threading.Event()

    def write(stream: int, data: bytes, source: object) -> None:
        written[stream] += data
        seen.set()

    relay = OutputRelay(write)
    (tmp_path / STDOUT_NAME).write_bytes(b"10 %\r")
    (tmp_path / STDERR_NAME).write_bytes(b"\xff\n")
    relay.follow(tmp_path)
    relay.follow(tmp_path / "of a rank without logs")
    assert seen.wait(5.0)
    with (tmp_path / STDOUT_NAME).open("ab") as log:
        log.write(b"100 %\n")
    relay.finish()
    assert written == {1: b"10 %\r100 %\n", 2: b"\xff\n"}


def test_a_terminal_that_takes_nothing_delays_the_end_by_its_patience_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.ranks.output._PATIENCE_S", 0.05)
    released = threading.Event()

    def write(stream: int, data: bytes, source: object) -> None:
        released.wait(5.0)

    relay = OutputRelay(write)
    (tmp_path / STDOUT_NAME).write_bytes(b"text")
    relay.follow(tmp_path)
    relay.finish()
    released.set()
