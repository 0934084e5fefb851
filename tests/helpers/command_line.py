"""The command `runner` without a process of its own: milliseconds instead of the imports of each start."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from runner.cli.main import main


def run_command(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `runner ARGUMENTS` and return its exit code and what it printed.

    Args:
        arguments: as typed. The command must return: `start` is for mistakes only.
        cwd: the folder to run in.
        environment: variables to set meanwhile.
    """
    # Of bytes below, as a real stream, whose errors="replace" the command sets.
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with (
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["runner", *arguments]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    printed, complaints = (stream.buffer.getvalue().decode() for stream in (output, errors))
    return subprocess.CompletedProcess(["runner", *arguments], code, printed, complaints)
