"""`runner start` from a notebook or another Python session: `from runner import start`.

The run is a process of its own, with its ranks below it: nothing of it is in the kernel, and nothing of the kernel in
a rank. It ends with the kernel, saved as after any stop request.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.agent.events import Log, TrainingStarted
from checkpointing.host.threads import is_readable
from runner.errors import ExitCode
from runner.journal.events import Progress
from runner.journal.journal import JournalReader
from runner.journal.run_directory import RunDirectory
from runner.program.program import find_program
from runner.system.text import visible

# It stops as on SIGTERM once the kernel is gone, also one that was killed.
_COMMAND = (
    "from runner.system import processes; processes.stop_with_parent(PARENT); from runner.__main__ import main; main()"
)
# Set by a kernel for what it shows itself: a pipe is no terminal, and a rank has no kernel to draw in.
_OF_THE_KERNEL = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "MPLBACKEND", "JPY_PARENT_PID")
_REFRESH_S = 0.5
# By exit code; a runner that has only begun ends by the signal itself.
_STATES = {int(ExitCode.DONE): "finished", int(ExitCode.PREEMPTED): "preempted", -signal.SIGTERM: "preempted"}


@dataclass(frozen=True)
class RunResult:
    """How a run has ended.

    Attributes:
        exit_code: That of `runner start`.
        state: ``finished``, ``preempted`` (stopped on request) or ``failed``.
        reason: Why it ended, for people.
        step: Newest finished step that is known.
        output_dir: Folder of the run.
    """

    exit_code: int
    state: str
    reason: str
    step: int
    output_dir: Path


def start(
    program: str | Path,
    *args: object,
    nproc_per_node: int | str | None = None,
    output_dir: str | Path | None = None,
    resume: str | int = "auto",
    module: bool = False,
    settings: Mapping[str, object] | None = None,
    show_output: bool = True,
) -> RunResult:
    """Run a training script to its end under `runner start`, with a progress bar, and restart it after failures.

    Interrupting the kernel stops the run as SIGTERM does, with its last state saved, and raises KeyboardInterrupt once
    it has ended; interrupting it again ends the run at once. The same call continues the run.

    Args:
        program: A Python file, a command of a Python package, or a module.
        args: Its arguments.
        nproc_per_node: Number of ranks; by default one per GPU, or 2 without GPUs.
        output_dir: Folder of the run; by default `runs/` and the program's name.
        resume: `auto`, `never` or a step.
        module: Whether `program` is the name of a module.
        settings: Further configuration keys with their values, such as `{"restart.max_restarts": 3}`.
        show_output: Whether to show what the run prints; it is in the folder of the run anyway.

    Returns:
        How the run has ended.

    Raises:
        UsageError: There is no such program.
    """
    words = [str(word) for word in (program, *args)]
    found = find_program(words[0], words[1:], module=module)
    assert found is not None
    folder = Path(output_dir if output_dir is not None else Path("runs") / found.stem)
    options = ["--output-dir", str(folder), "--resume", str(resume)]
    if nproc_per_node is not None:
        options += ["--nproc-per-node", str(nproc_per_node)]
    for key, value in (settings or {}).items():
        options += ["--set", f"{key}={_yaml(value)}"]
    command = [*options, *(["-m"] if module else []), *words]
    return _Watched(command, folder, show_output=show_output).run()


def _yaml(value: object) -> str:
    import json

    # JSON is YAML, too.
    return value if isinstance(value, str) else json.dumps(value)


class _Watched:
    """One `runner start`, its output and its progress."""

    def __init__(self, options: list[str], folder: Path, *, show_output: bool) -> None:
        self._folder, self._show_output = folder, show_output
        # The run's folder may be another one's until the run has begun.
        self._journal, self._num_seen = JournalReader(RunDirectory(str(folder)).journal), 0
        self._step, self._total, self._loss = 0, 0, ""
        self._shown_step = -1
        self._line, self._lines = b"", deque[str](maxlen=100)
        self._options = options

    def run(self) -> RunResult:
        """Start the run, and follow it to its end."""
        # First, as it may fail, and an interrupt may come: nothing stops what runs by then.
        with warnings.catch_warnings():
            # Without ipywidgets the bar is text.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm

        self._process = self._started()
        try:
            with tqdm(desc=self._folder.name, unit="step", dynamic_ncols=True) as bar:
                interrupts = self._outlast(bar)
        finally:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait()
        result = self._result()
        if interrupts:
            print(f"{result.state} at step {result.step}: {result.reason}; the same call continues")
            raise KeyboardInterrupt
        return result

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND.replace("PARENT", str(os.getpid())), "start", *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in _OF_THE_KERNEL},
            # An interrupt of the kernel goes to all of its process group.
            start_new_session=True,
        )

    def _outlast(self, bar: Any) -> int:
        """Follow the run to its end; returns how often the kernel was interrupted."""
        interrupts = 0
        while True:
            try:
                self._follow(bar)
            except KeyboardInterrupt:
                interrupts += 1
                bar.write("stopping: the ranks save their state; interrupt again to end at once")
                self._process.send_signal(signal.SIGTERM)
            else:
                return interrupts

    def _follow(self, bar: Any) -> None:
        """Show output and progress until the run has ended."""
        due = 0.0
        while self._process.poll() is None:
            self._pass_on(bar, _REFRESH_S)
            if time.monotonic() >= due:
                due = time.monotonic() + _REFRESH_S
                self._show(bar)
        while self._pass_on(bar, 0.0):
            pass
        if self._line:
            # It has no end, as the process was killed.
            self._say(bar, [self._line])
            self._line = b""
        self._show(bar)

    def _pass_on(self, bar: Any, patience_s: float) -> bool:
        """Show what the run prints; returns whether there was something."""
        pipe = self._process.stdout
        assert pipe is not None
        if not is_readable(pipe, patience_s):
            return False
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            # Closed before its end, which `poll` sees soon.
            time.sleep(min(patience_s, 0.02))
            return False
        *lines, self._line = (self._line + data).split(b"\n")
        self._say(bar, lines)
        return True

    def _say(self, bar: Any, lines: list[bytes]) -> None:
        # A progress bar of the script draws over itself.
        texts = [visible(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")) for line in lines]
        self._lines.extend(texts)
        if self._show_output and texts:
            bar.write("\n".join(texts))

    def _show(self, bar: Any) -> None:
        entries = self._journal.entries()
        if len(entries) < self._num_seen:
            # Another journal in its place.
            self._num_seen = self._step = self._total = 0
        for entry in entries[self._num_seen :]:
            match entry.event:
                case TrainingStarted() as begun:
                    self._step, self._total = begun.step_of_run, begun.total_steps or self._total
                case Log() as log:
                    self._step, self._loss = log.step_of_run, f"{log.loss:.4g}"
                case Progress(step=step):
                    self._step = max(self._step, step)
                case _:
                    pass
        self._num_seen = len(entries)
        bar.total, bar.n = self._total or None, self._step
        shown = {"loss": self._loss, "attempt": entries[-1].attempt if entries else 0}
        before = bar.postfix, self._shown_step
        bar.set_postfix({name: value for name, value in shown.items() if value}, refresh=False)
        self._shown_step = self._step
        # What is drawn stays in the saved notebook.
        if (bar.postfix, self._shown_step) != before:
            bar.refresh()

    def _result(self) -> RunResult:
        code = self._process.returncode
        said = [line.removeprefix("runner: ") for line in self._lines if line.startswith("runner: ")]
        reason = said[-1] if said else f"it ended with {code} before it said anything"
        state = _STATES.get(code, "failed")
        return RunResult(code, state, reason if code else state, self._step, self._folder)
