from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from runner.launcher.launch_request import EVERYTHING
from runner.system.processes import PRELOAD_ENV


@pytest.mark.process
def test_a_module_that_cannot_be_imported_leaves_ranks_the_others_and_their_garbage_collection(tmp_path: Path) -> None:
    """The fork server goes on without it, and what a rank has is what the server had."""
    (tmp_path / "trl.py").write_text("raise ImportError('a version that does not fit')")
    (tmp_path / "deepspeed.py").write_text("print('found no GPU')")
    code = """
        import gc, sys
        sys.path.insert(0, sys.argv[1])
        import runner.training.preload
        print(gc.isenabled(), "transformers.trainer" in sys.modules, "deepspeed" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    environment = {**os.environ, PRELOAD_ENV: " ".join(EVERYTHING)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout == "True True True\n", done.stderr
