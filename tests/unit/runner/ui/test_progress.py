"""The console: one line of state, and messages that do not break what ranks print."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpointing.agent.events import Transfer
from runner.ui import progress
from runner.ui.progress import ProgressDisplay, ProgressState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.TextIOWrapper):
    """A stream that keeps what is written, with bytes below it as standard output has."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding="utf-8", write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def text(self) -> str:
        return self.raw_bytes.getvalue().decode()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Terminal:
    # rich asks the environment what the terminal can do.
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal()


def shown(output: Terminal, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ProgressDisplay:
    monkeypatch.setattr(sys, "stdout", output)
    return ProgressDisplay(**options)


def test_messages_have_the_time_since_the_start(
    output: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = shown(output, monkeypatch)
    clock.now += 12.34
    display.message("step 3: [bold] is text")
    assert output.text == "[   12.3s] step 3: [bold] is text\n"


def test_the_line_says_what_is_known(output: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    display = shown(output, monkeypatch)
    assert display.line() == "starting · committed none · attempt 0"
    display.state = ProgressState(2, 30, 120, 2.5, 12345.6, 20, "step 30", "upload of step 20: 50 % of 8 MB")
    assert display.line() == (
        "step 30/120 · loss 2.5000 · 12,346 tokens/s · committed 20 · attempt 2 · upload of step 20: 50 % of 8 MB"
    )


def test_plain_lines_come_every_five_seconds_and_only_if_they_differ(
    output: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = shown(output, monkeypatch)
    display.refresh()
    assert output.text == "", "nothing before the first step"
    for step, seconds in ((1, 0.0), (2, 4.0), (2, 2.0), (2, 60.0)):
        clock.now += seconds
        display.state.step, display.state.activity, display.state.trains = step, f"step {step}", True
        display.refresh()
    lines = [line.partition(" ·")[0] for line in output.text.splitlines()]
    assert lines == ["[    0.0s] step 1", "[    6.0s] step 2"]


def test_what_a_start_is_busy_with_is_said_after_ten_seconds_of_silence(
    output: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 85 s passed without a line until the first step."""
    display = shown(output, monkeypatch)
    for seconds, activity in ((9.0, "loading torch"), (1.0, "loading torch"), (9.0, "reading the data")):
        clock.now += seconds
        display.state.activity = activity
        display.refresh()
    # What ranks print is no silence.
    display.pass_on(1, b"text\n")
    clock.now += 9.0
    display.refresh()
    clock.now += 1.0
    display.refresh()
    assert output.text.splitlines() == ["[   10.0s] loading torch …", "text", "[   29.0s] reading the data …"]


def test_the_longer_a_wait_is_the_rarer_are_its_lines(
    output: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = shown(output, monkeypatch)
    for _ in range(3600):
        clock.now += 1.0
        display.refresh()
    assert len(output.text.splitlines()) < 40
    display.state.trains = True
    display.refresh()
    display.state.trains = False
    before = output.text
    clock.now += 10.0
    display.refresh()
    assert output.text != before, "another attempt says at once what it does"


@pytest.mark.parametrize(
    ("stream", "data", "newline"),
    [(1, b"10 %|###", "\n"), (1, b"done\n", ""), (2, b"10 %|###", "")],
)
def test_a_message_begins_a_line_after_a_ranks_unfinished_one(
    output: Terminal, monkeypatch: pytest.MonkeyPatch, stream: int, data: bytes, newline: str
) -> None:
    display, errors = shown(output, monkeypatch), Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    display.pass_on(stream, data)
    display.message("text")
    written = (output if stream == 1 else errors).text
    assert written.startswith(data.decode())
    expected = (data.decode() if stream == 1 else "") + newline + "[    0.0s] text\n"
    assert output.text == expected


def test_a_quiet_console_shows_what_ranks_print(output: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    display = shown(output, monkeypatch, quiet=True)
    display.message("text")
    display.pass_on(1, b"of a rank")
    display.message("text")
    assert output.text == "of a rank"


def test_what_a_script_shows_itself_is_not_repeated(
    output: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = shown(output, monkeypatch, live=False)
    display.state = ProgressState(1, 30, 120, 2.5, committed_step=None, activity="step 30", trains=True)
    display.pass_on(1, b" 25%|##", "rank 0")
    display.refresh()
    display.state.committed_step = 20
    clock.now += 6
    display.refresh()
    assert output.text == " 25%|##\n[    6.0s] committed 20\n"
    # It has become silent.
    clock.now += 20
    display.refresh()
    assert "step 30/120 · loss 2.5000 · committed 20" in output.text


def test_both_streams_of_one_file_share_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("a") as one, (tmp_path / "log").open("a") as other:
        monkeypatch.setattr(sys, "stdout", one)
        monkeypatch.setattr(sys, "stderr", other)
        display = ProgressDisplay(live=False)
        display.pass_on(2, b" 25%|##", "rank 0")
        display.message("text")
        assert (tmp_path / "log").read_text().splitlines()[0] == " 25%|##"


def test_a_terminal_has_a_live_line_with_a_bar(monkeypatch: pytest.MonkeyPatch, output: Terminal) -> None:
    terminal = Terminal(is_terminal=True)
    display = shown(terminal, monkeypatch)
    display.state.step, display.state.total_steps = 60, 120
    display.refresh()
    assert "█" * 12 + "░" * 12 + " step 60/120" in terminal.text
    display.close()
    display.close()


def test_a_script_has_no_live_line(monkeypatch: pytest.MonkeyPatch, output: Terminal) -> None:
    terminal = Terminal(is_terminal=True)
    display = shown(terminal, monkeypatch, live=False)
    display.refresh()
    assert terminal.text == ""


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (1_000_000, 4_000_000, "upload of step 5: 25 % of 4 MB"),
        (4_000_000, 4_000_000, ""),
        (0, 0, "upload of step 5: 0 % of 0 MB"),
    ],
)
def test_a_transfer_is_shown_until_it_is_complete(done: int, total: int, text: str) -> None:
    state = ProgressState()
    state.show_transfer(Transfer(step=5, what="upload", done=done, total=total))
    assert state.transfer == text
