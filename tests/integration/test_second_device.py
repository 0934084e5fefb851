"""`pytest -m device`, in a process of its own: once the second device is loaded, torch has an accelerator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import second_device

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler or no ninja here")
def test_the_engine_on_a_second_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", "tests/device"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
