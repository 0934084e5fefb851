"""`runner start` from Python: command, result and interrupt, with a process that stands in for `runner start`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runner
from runner import notebook
from runner.errors import UsageError
from runner.notebook import RunResult, start

# Writes the journal of a run, and what it was called with; `how` says how it ends.
STAND_IN = """
import json, os, signal, sys, time
folder = sys.argv[sys.argv.index("--output-dir") + 1]
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, "called.json"), "w") as file:
    json.dump({{"arguments": sys.argv, "names": sorted(os.environ), "group": os.getpgid(0)}}, file)
signals = []
def stop(number, frame):
    signals.append(number)
    print("stopping", len(signals), flush=True)
    if len(signals) == {after}:
        print("runner: stopped: on request (exit code 75)", flush=True)
        os._exit(75)
signal.signal(signal.SIGTERM, stop)
lines = [{{"event": "training_started", "step": 0, "total_steps": 10}}, {{"event": "log", "step": 7, "loss": 0.5}}]
with open(os.path.join(folder, "journal.jsonl"), "w") as journal:
    for line in lines:
        journal.write(json.dumps({{"time": time.time(), "attempt": 2, **line}}) + "\\n")
print("hello \\x1b[2J from a rank", flush=True)
{how}
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def use(how: str = "", after: int = 1) -> None:
        monkeypatch.setattr(notebook, "_COMMAND", STAND_IN.format(how=how, after=after))

    use()
    return use


def called(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "called.json").read_text())
    return found


def test_the_command_and_the_result(
    stand_in: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    settings = {"restart.max_restarts": 3, "notify.events": ["failed"], "checkpoint.location": "s3://b/p"}
    assert start("train.py", "--lr", 3, nproc_per_node=2, settings=settings) == RunResult(
        0, "finished", "finished", 7, Path("runs/train")
    )
    call = called(tmp_path / "runs" / "train")
    assert call["arguments"][1:] == [
        *("start", "--output-dir", "runs/train", "--resume", "auto", "--nproc-per-node", "2"),
        *("--set", "restart.max_restarts=3", "--set", 'notify.events=["failed"]'),
        *("--set", "checkpoint.location=s3://b/p", "train.py", "--lr", "3"),
    ]
    assert not {"FORCE_COLOR", "MPLBACKEND"} & set(call["names"]) and "PATH" in call["names"]
    shown = capsys.readouterr()
    assert "hello \\x1b[2J from a rank" in shown.out and "7/10" in shown.err and "loss=0.5" in shown.err


@pytest.mark.parametrize(
    ("how", "code", "state", "reason"),
    [
        ("print('runner: failed: rank 0 (exit code 78)'); sys.exit(78)", 78, "failed", "failed: rank 0 (exit code 78)"),
        ("print('runner: stopped: x'); sys.exit(75)", 75, "preempted", "stopped: x"),
        ("os.kill(os.getpid(), 9)", -9, "failed", "it ended with -9 before it said anything"),
        ("os.close(1); os.close(2); time.sleep(0.3); os._exit(3)", 3, "failed", "it ended with 3 before"),
    ],
)
def test_ends(how: str, code: int, state: str, reason: str, stand_in: Callable[..., None]) -> None:
    stand_in(how)
    result = start("train.py", output_dir="out", show_output=False)
    assert (result.exit_code, result.state, result.output_dir) == (code, state, Path("out"))
    assert result.reason.startswith(reason)


def test_a_last_line_without_its_end_is_shown(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("print('runner: failed: no end of line', end='', flush=True); os._exit(78)")
    assert start("train.py").reason == "failed: no end of line"
    assert capsys.readouterr().out.endswith("runner: failed: no end of line\n")


def test_nothing_runs_on_if_the_bar_cannot_be_shown(
    stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was started before tqdm was imported: an interrupt there left a run that nothing stopped."""
    stand_in("time.sleep(30)")
    opened: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        opened.append(popen(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tqdm.auto", None)
        with pytest.raises(ImportError):
            start("train.py")
    assert not opened

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tqdm.auto.tqdm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start("train.py")
    assert len(opened) == 1 and opened[0].poll() is not None


def interrupt_when(path: Path, times: int) -> None:
    """Interrupt this process, as a kernel is, once there is a file."""

    def work() -> None:
        while not path.exists():
            time.sleep(0.02)
        for _ in range(times):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=work, daemon=True).start()


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_stops_the_run_and_is_raised_when_it_has_ended(
    times: int, stand_in: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As in a kernel: what a shell starts in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stand_in("while True: time.sleep(0.05)", after=times)
    interrupt_when(tmp_path / "out" / "journal.jsonl", times)
    try:
        with pytest.raises(KeyboardInterrupt):
            start("train.py", output_dir="out")
    finally:
        signal.signal(signal.SIGINT, before)
    shown = capsys.readouterr().out
    assert f"stopping {times}\n" in shown and "preempted at step 7: stopped: on request" in shown
    # The signal reached the kernel's own group alone.
    assert called(tmp_path / "out")["group"] != os.getpgid(0)


def test_a_program_that_is_not_there(stand_in: Callable[..., None]) -> None:
    with pytest.raises(UsageError, match=r"script 'missing.py' does not exist"):
        start("missing.py")


def test_a_module_has_a_folder_of_its_name(stand_in: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "job.py").touch()
    assert start("own.job", module=True).output_dir == Path("runs/own-job")
    assert called(tmp_path / "runs" / "own-job")["arguments"][-2:] == ["-m", "own.job"]


def test_the_package_imports_it_when_asked() -> None:
    code = "import sys, runner; assert 'runner.notebook' not in sys.modules and len(sys.modules) < 200; runner.start"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert runner.start is start and runner.RunResult is RunResult
    with pytest.raises(AttributeError, match="no attribute 'stop'"):
        runner.stop  # noqa: B018


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_command_ends_with_its_parent(tmp_path: Path) -> None:
    """By SIGTERM, on which a run saves, and by one only, however many threads the parent has."""
    waits = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('told', file=open('ended', 'a')))"
    waits += "; open('ready', 'w'); [time.sleep(0.2) for _ in range(300)]"
    code = notebook._COMMAND.partition("; from runner.__main__")[0] + f"; {waits}"
    parent = "import os, subprocess, sys, threading, time; code = sys.argv[1].replace('PARENT', str(os.getpid())); "
    parent += "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(8)]; "
    parent += "child = subprocess.Popen([sys.executable, '-c', code]); print(child.pid, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", parent, code]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        wait_for((tmp_path / "ready").exists)
        process.kill()
        wait_for((tmp_path / "ended").exists)
    time.sleep(1.0)
    os.kill(child, signal.SIGKILL)
    assert (tmp_path / "ended").read_text() == "told\n"
