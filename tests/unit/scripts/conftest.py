"""Modules of scripts/, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def check_links() -> ModuleType:
    return load("check_links")


@pytest.fixture(scope="session")
def site_hooks() -> ModuleType:
    return load("site_hooks")


@pytest.fixture(scope="session")
def project_figures() -> ModuleType:
    return load("project_figures")
