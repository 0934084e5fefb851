"""Writes the stacks of hung processes to files: Python and native ones by py-spy, and the kernel's view."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from runner.system import processes

_TIMEOUT_S = 8.0


def dump_stacks(pids: Mapping[str, int], folder: Path, pump: Callable[[], None]) -> list[Path]:
    """Write `stacks-<name>.txt` for every process.

    Never raises, and takes 8 seconds at most; errors are written to the files.

    Args:
        pids: Process ids by name, for example `rank1`.
        folder: Folder for the files, created if needed.
        pump: Called while py-spy works.

    Returns:
        The files that were written.
    """
    files = []
    dumps: list[tuple[subprocess.Popen[bytes], Path]] = []
    for name, pid in pids.items():
        path = folder / f"stacks-{name}.txt"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(_kernel_view(pid))
                file.flush()
                with contextlib.suppress(OSError):
                    dumps.append((subprocess.Popen(_command(pid), stdout=file, stderr=file), path))
            files.append(path)
    deadline = time.monotonic() + _TIMEOUT_S
    while any(process.poll() is None for process, _ in dumps) and time.monotonic() < deadline:
        pump()
    for process, path in dumps:
        if process.poll() is None:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError), path.open("ab") as file:
                file.write(f"\npy-spy was ended after {_TIMEOUT_S:.0f} s\n".encode())
    return files


def _command(pid: int) -> list[str]:
    """Return py-spy's command; it only reads the memory of a stopped process, whose native frames it cannot unwind."""
    spy = Path(sys.executable).with_name("py-spy")
    how = "--nonblocking" if processes.state(pid) in ("T", "t", "D", "Z") else "--native"
    return [str(spy) if spy.exists() else "py-spy", "dump", how, "--pid", str(pid)]


def _kernel_view(pid: int) -> bytes:
    lines = [f"process {pid}, state {processes.state(pid)}"]
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError):
            lines.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            lines.append(
                f"thread {task.name}: {(task / 'comm').read_text().strip()}, state {processes.state(int(task.name))}"
            )
    return ("\n".join(lines) + "\n\n").encode()
