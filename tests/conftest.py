from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.servers import Server, radosgw_server, rclone_server
from helpers.wire import cut, wire
from hypothesis import HealthCheck, settings
from infra.parts import require

# pytest imports tracemalloc when it finds something unclosed. Two threads that did so at once failed the test: one of
# them got it half imported.
__all__ = ["cut", "tracemalloc", "wire"]

pytest_plugins = ["infra.tiers"]

# The same cases every time: a run of the tests does not fail by chance. HYPOTHESIS_EXPLORE=1 draws others, and
# HYPOTHESIS_EXAMPLES=500000 so many for each property.
settings.register_profile(
    "tests",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="HYPOTHESIS_EXPLORE" not in os.environ,
    database=None,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "100")),
)
settings.load_profile("tests")
# Before anybody imports it.
pytest.register_assert_rewrite("contract.support")
# Threads of one process that spin while they wait for each other take the cores from the other tests' processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require("rclone")
    with rclone_server(Path(tmp_path_factory.mktemp("rclone")) / "data") as server:
        yield server


@pytest.fixture(scope="session")
def radosgw_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require("radosgw")
    with radosgw_server(Path(tmp_path_factory.mktemp("radosgw")) / "data") as server:
        yield server
