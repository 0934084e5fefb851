from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from infra.parts import find
from integration.support import SHORT_JOB, Run, finished_once, script, shared_folder


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbs; all others must end like it."""
    return finished_once(shared_folder(tmp_path_factory) / "untouched", *SHORT_JOB)


@pytest.fixture(scope="session")
def untouched_script(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Likewise, of the user's script."""
    folder = shared_folder(tmp_path_factory) / "untouched-script"
    run = finished_once(folder / "run", script=lambda: script(folder))
    assert "script finished on rank 0" in run.output and "script finished on rank 1" in run.output
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = importlib.import_module("playwright.sync_api")
    program = find("chromium")
    with sync_api.sync_playwright() as playwright:
        # Chromium's own sandbox wants a user other than root.
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()
