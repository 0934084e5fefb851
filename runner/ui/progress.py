"""What the user sees while a run goes on: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_PLAIN_INTERVAL_S = 5.0
_BAR_CELLS = 24


@dataclass
class ProgressState:
    """What is shown. Steps are global optimizer steps; None is not known yet."""

    attempt: int = 0
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    committed_step: int | None = None
    activity: str = "starting"
    transfer: str = ""

    def show_transfer(self, message: dict[str, Any]) -> None:
        """Bytes of a checkpoint on their way to or from storage; nothing is shown of what is through."""
        done, total = message["done"], max(message["total"], 1)
        percent = f"{100 * min(done, total) // total} % of {total / 1e6:,.0f} MB"
        self.transfer = f"{message['what']} of step {message['step']}: {percent}" if done < total else ""


class ProgressDisplay:
    """Shows a `ProgressState` and messages between. Only the supervisor of the first node has one that speaks."""

    def __init__(self, *, quiet: bool = False, live: bool = True) -> None:
        """
        Args:
            quiet: Shows nothing but what ranks print.
            live: Keep a line at the bottom of a terminal; not where a script prints what it likes.
        """
        self.state = ProgressState()
        self._console = Console(stderr=False, highlight=False, quiet=quiet, soft_wrap=True)
        self._live: Live | None = None
        self._shown = ""
        self._shown_at = 0.0
        self._began = time.monotonic()
        # Ranks' output comes from another thread.
        self._lock = threading.Lock()
        # The stream whose last line has no end yet: 1, 2, or 0 for none.
        self._mid_line = 0
        if self._console.is_terminal and live:
            self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def message(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            if self._mid_line and not self._console.quiet and (self._mid_line == 1 or self._console.is_terminal):
                # A rank's progress bar.
                self._console.file.write("\n")
                self._mid_line = 0
            self._console.print(f"[{time.monotonic() - self._began:7.1f}s] {text}", markup=False)

    def pass_on(self, stream: int, data: bytes) -> None:
        """What a rank has written to its standard output (1) or error (2), as it is."""
        target = sys.stdout if stream == 1 else sys.stderr
        with self._lock:
            target.buffer.write(data)
            target.buffer.flush()
            self._mid_line = 0 if data.endswith(b"\n") else stream

    def refresh(self) -> None:
        """Show the state, if it has changed; call it as often as you like."""
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
        if self._live is not None:
            self._live.stop()
            self._live = None
