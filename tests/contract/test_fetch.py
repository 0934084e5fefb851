"""A checkpoint in object storage that an attempt resumes from: the agent reads it while the ranks get ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from contract.support import commit
from helpers.servers import Server, bucket_on, fault_proxy

from checkpointing.agent.client import AgentClient, AgentProcess
from checkpointing.agent.options import AgentOptions
from checkpointing.format.digest import digest_buffer
from checkpointing.resume.verified_read import BufferCache
from checkpointing.storage import open_storage

NBYTES = 80 << 20


def test_room_is_made_until_the_last_byte_has_arrived(
    rclone_s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(rclone_s3) as line:
        location = f"s3://{bucket_on(line, monkeypatch)}/run"
        manifest = commit(open_storage(location), 5, nbytes=NBYTES)
        # On each of five connections: 40 s in all, of which little has passed when the rank asks.
        line.set(rate_bps=NBYTES / 200)
        agent = AgentProcess.start(AgentOptions(location=location, run_id="run"))
        client = AgentClient(agent.socket_path, 2, 0, 0, 1)
        room = BufferCache(except_for="model")
        try:

            def fetching(sizes: dict[str, int], arrived: Callable[[], bool]) -> None:
                assert sizes == {"model": NBYTES, "state": 6}
                assert not arrived()
                line.set()
                deadline = time.monotonic() + 120
                while not arrived():
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                room.make({"model": NBYTES, "state": 6, "optimizer": NBYTES}, arrived)

            offered = client.offer(fetching)
            snapshots = offered.snapshots
            assert offered.is_reachable and [snapshot.info.step for snapshot in snapshots] == [5]
            for file in manifest.files:
                assert digest_buffer(snapshots[0].files[file.name]) == file.digest
            assert room.take("optimizer", NBYTES) is None, "there was no time left"
        finally:
            client.close()
            agent.close(10)
