"""Progress of a run on the console: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from checkpointing.agent.events import Transfer
from runner.system.text import visible
from runner.ui.shared_lines import SharedLines

_PLAIN_INTERVAL_S = 5.0
# After so long without a line, what a start is busy with is said; after a share of a longer wait.
_SILENCE_S, _SILENCE_SHARE = 10.0, 1 / 6
_BAR_CELLS = 24
# A script that has printed nothing for so many seconds says nothing of its progress.
_SPEAKS_S = 15.0


@dataclass
class ProgressState:
    """The values that are shown; None for those that are not known yet.

    Loss and tokens per second, of all ranks, are those of the newest log entry. `activity` is what is done until the
    attempt `trains`. `transfer` is about an upload or a download; it is empty if there is none.
    """

    attempt: int = 0
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    committed_step: int | None = None
    activity: str = "starting"
    transfer: str = ""
    trains: bool = False

    def show_transfer(self, transfer: Transfer) -> None:
        """Show the progress of an upload or a download until it is complete."""
        done, total = transfer.done, max(transfer.total, 1)
        percent = f"{100 * min(done, total) // total} % of {total / 1e6:,.0f} MB"
        self.transfer = f"{transfer.what} of step {transfer.step}: {percent}" if done < total else ""


class ProgressDisplay:
    """Shows a `ProgressState`, and messages between its updates. Only the leader's runner shows anything."""

    def __init__(self, *, quiet: bool = False, live: bool = True) -> None:
        """Open the console.

        Args:
            quiet: Show only what ranks print.
            live: Keep a line at the bottom of a terminal; off for scripts, which print there themselves.
        """
        self.state = ProgressState()
        self._console = Console(stderr=False, highlight=False, quiet=quiet, soft_wrap=True)
        self._live: Live | None = None
        self._shown = ""
        self._shown_at = 0.0
        self._began = self._spoken_at = self._waiting_since = time.monotonic()
        # Ranks' output arrives in another thread.
        self._lock = threading.Lock()
        # By terminal or file, where standard output (1) and standard error (2) lead.
        self._lines: dict[object, SharedLines] = {}
        # When a rank printed something; what a script shows itself is not repeated.
        self._heard_at = -_SPEAKS_S
        if self._console.is_terminal and live:
            self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def show(self) -> None:
        """End being quiet."""
        self._console.quiet = False

    def message(self, text: str) -> None:
        """Print a line."""
        with self._lock:
            self._spoken_at = time.monotonic()
            line = f"[{self._spoken_at - self._began:7.1f}s] {visible(text)}"
            if self._live is not None:
                self._console.print(line, markup=False)
            elif not self._console.quiet:
                self._lines_of(sys.stdout).put("runner", f"{line}\n".encode(sys.stdout.encoding, "replace"))

    def pass_on(self, stream: int, data: bytes, source: object = None) -> None:
        """Print unchanged what a rank has written to standard output (1) or standard error (2).

        Args:
            stream: 1 or 2.
            data: What it has written.
            source: Tells what writes lines of its own there from others.
        """
        with self._lock:
            self._heard_at = time.monotonic()
            self._lines_of(sys.stdout if stream == 1 else sys.stderr).put(source, data)

    def _lines_of(self, target: TextIO) -> SharedLines:
        try:
            status = os.fstat(target.fileno())
            where: object = (status.st_dev, status.st_ino)
        except (OSError, ValueError):
            where = id(target)
        if where not in self._lines:

            def write(data: bytes) -> None:
                target.buffer.write(data)
                target.buffer.flush()

            self._lines[where] = SharedLines(write, is_terminal=target.isatty())
        return self._lines[where]

    def refresh(self) -> None:
        """Show the state if it has changed, and what a start is busy with after some seconds of silence."""
        line = self.line()
        now = time.monotonic()
        if self.state.trains:
            self._waiting_since = now
        silence_s = max(_SILENCE_S, _SILENCE_SHARE * (now - self._waiting_since))
        if self._live is not None:
            if line != self._shown:
                self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
                self._shown = line
        elif not self.state.trains and now - max(self._spoken_at, self._heard_at) >= silence_s:
            self.message(f"{self.state.activity} …")
        elif line and line != self._shown and self.state.step > 0 and now - self._shown_at >= _PLAIN_INTERVAL_S:
            self.message(line)
            self._shown, self._shown_at = line, now

    def line(self) -> str:
        """Return the state as one line, without what a script shows itself."""
        state = self.state
        if self._live is None and time.monotonic() - self._heard_at < _SPEAKS_S:
            if state.committed_step is None:
                return ""
            return " · ".join(filter(None, [f"committed {state.committed_step}", state.transfer]))
        parts = [state.activity]
        if state.total_steps:
            filled = min(state.step * _BAR_CELLS // state.total_steps, _BAR_CELLS)
            bar = "█" * filled + "░" * (_BAR_CELLS - filled) + " " if self._live is not None else ""
            parts = [f"{bar}step {state.step}/{state.total_steps}"]
        if state.loss is not None:
            parts.append(f"loss {state.loss:.4f}")
        if state.tokens_per_s is not None:
            parts.append(f"{state.tokens_per_s:,.0f} tokens/s")
        committed = "none" if state.committed_step is None else str(state.committed_step)
        parts += [f"committed {committed}", f"attempt {state.attempt}", *filter(None, [state.transfer])]
        return " · ".join(parts)

    def close(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None
