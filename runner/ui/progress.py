"""Progress of a run on the console: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from checkpointing.agent.events import Transfer
from runner.system.text import visible

_PLAIN_INTERVAL_S = 5.0
_BAR_CELLS = 24


@dataclass
class ProgressState:
    """The values that are shown; None for those that are not known yet.

    Loss and tokens per second, of all ranks, are those of the newest log entry. `transfer` is about an upload or a
    download; it is empty if there is none.
    """

    attempt: int = 0
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    committed_step: int | None = None
    activity: str = "starting"
    transfer: str = ""

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
        self._began = time.monotonic()
        # Ranks' output arrives in another thread.
        self._lock = threading.Lock()
        # The stream whose last line is unfinished: 1 or 2; 0 for none.
        self._mid_line = 0
        if self._console.is_terminal and live:
            self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def show(self) -> None:
        """End being quiet."""
        self._console.quiet = False

    def message(self, text: str) -> None:
        """Print a line."""
        with self._lock:
            if self._mid_line and not self._console.quiet and (self._mid_line == 1 or self._console.is_terminal):
                # A rank's progress bar is on the line.
                self._console.file.write("\n")
                self._mid_line = 0
            self._console.print(f"[{time.monotonic() - self._began:7.1f}s] {visible(text)}", markup=False)

    def pass_on(self, stream: int, data: bytes) -> None:
        """Print unchanged what a rank has written to standard output (1) or standard error (2)."""
        target = sys.stdout if stream == 1 else sys.stderr
        with self._lock:
            target.buffer.write(data)
            target.buffer.flush()
            self._mid_line = 0 if data.endswith(b"\n") else stream

    def refresh(self) -> None:
        """Show the state if it has changed."""
        line = self.line()
        now = time.monotonic()
        if self._live is not None:
            if line != self._shown:
                self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
                self._shown = line
        elif line != self._shown and self.state.step > 0 and now - self._shown_at >= _PLAIN_INTERVAL_S:
            self.message(line)
            self._shown, self._shown_at = line, now

    def line(self) -> str:
        """Return the state as one line."""
        state = self.state
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
