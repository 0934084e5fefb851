"""A writer of checkpoints is killed, or gets an error, at every failpoint; then another process reads what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from contract.support import assert_good_order, leftovers
from helpers.servers import Server, bucket_on

from checkpointing.host.failpoints import FAILPOINTS_ENV, NAMES
from checkpointing.storage import open_storage

# The second attempt goes back to step 2, so the first attempt's checkpoint of step 3 is quarantined.
OPERATIONS = ["begin:1", "commit:1", "commit-large:2", "commit:3", "remove:1", "aside:3", "begin:2"]
OPERATIONS += ["commit-together:5", "commit:4"]
# Of a file that two nodes write.
SPLIT_OPERATIONS = ["begin:1", "commit:1", "commit-split:5", "commit:4"]
SPLIT = dict.fromkeys(("split.written", "split.closed", "portion.written", "portion.reported"), ("commit-split:5", 1))
# What the node does that does not commit.
OTHER_NODE = {"shard.written": ("commit-together:5", 1), "shard.reported": ("commit-together:5", 1)}
# The operation that is interrupted there, and at which pass of the failpoint: never in the first save.
LOCAL = {
    "fence.written": ("begin:2", 4),
    "fence.opened": ("begin:2", 2),
    "fence.published": ("begin:2", 2),
    "local.begun": ("commit-large:2", 2),
    "local.write": ("commit-large:2", 4),
    "local.written": ("commit-large:2", 3),
    "local.manifest": ("commit-large:2", 2),
    "local.synced": ("commit-large:2", 2),
    "local.renamed": ("commit-large:2", 2),
    "local.committed": ("commit-large:2", 2),
    "local.removing": ("remove:1", 1),
    "local.unlisted": ("remove:1", 1),
    **OTHER_NODE,
}
REMOTE = {
    "fence.opened": ("begin:2", 2),
    "fence.published": ("begin:2", 2),
    "remote.part": ("commit-large:2", 2),
    "remote.uploaded": ("commit-large:2", 4),
    "remote.publishing": ("commit-large:2", 2),
    "remote.published": ("commit-large:2", 2),
    "remote.committed": ("commit-large:2", 2),
    "remote.unlisted": ("remove:1", 1),
    "aside.copied": ("aside:3", 1),
    **OTHER_NODE,
}


def test_every_failpoint_of_the_storages_is_tried() -> None:
    # Those of `torch.distributed.checkpoint` are tried in test_dcp.
    elsewhere = ("training.", "snapshot.", "restore.", "leader.", "dcp.")
    others = SPLIT.keys() | {name for name in NAMES if name.startswith(elsewhere)}
    assert {*LOCAL, *REMOTE} | others == {*NAMES}


@pytest.mark.process
@pytest.mark.parametrize("action", ["kill", "error"])
@pytest.mark.parametrize("point", LOCAL)
def test_on_a_disk(point: str, action: str, tmp_path: Path) -> None:
    interrupt(str(tmp_path / "store"), point, action, *LOCAL[point])


@pytest.mark.parametrize("action", ["kill", "error"])
@pytest.mark.parametrize("point", REMOTE)
def test_in_object_storage(point: str, action: str, radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(f"s3://{bucket_on(radosgw_s3, monkeypatch)}/run", point, action, *REMOTE[point])


@pytest.mark.process
@pytest.mark.parametrize("action", ["kill", "error"])
@pytest.mark.parametrize("point", SPLIT)
def test_of_a_file_that_two_nodes_write_on_a_disk(point: str, action: str, tmp_path: Path) -> None:
    interrupt(str(tmp_path / "store"), point, action, *SPLIT[point], SPLIT_OPERATIONS)


@pytest.mark.parametrize("action", ["kill", "error"])
@pytest.mark.parametrize("point", SPLIT)
def test_of_an_object_that_two_nodes_write(
    point: str, action: str, radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(f"s3://{bucket_on(radosgw_s3, monkeypatch)}/run", point, action, *SPLIT[point], SPLIT_OPERATIONS)


def interrupt(
    location: str, point: str, action: str, operation: str, number: int, operations: list[str] = OPERATIONS
) -> None:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("writer.py")), location, *operations],
        env={**os.environ, FAILPOINTS_ENV: f"{point}={action}@{number}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = result.stdout.splitlines()
    if action == "kill":
        assert (result.returncode, lines[-1]) == (-signal.SIGKILL, f"doing {operation}"), result
    else:
        failed = [line for line in lines if line.startswith("failed")]
        assert result.returncode == 0 and lines[-1] == "done commit:4", result
        if point in ("shard.reported", "portion.written", "portion.reported"):
            # The node that commits knows all that it needs, or writes by itself what the other one has not.
            assert failed == [], failed
            assert_good_order(location, kept_by(lines))
            return
        assert len(failed) == 1 and failed[0].startswith(f"failed {operation}") and point in failed[0], failed
        if operation.startswith("commit"):
            assert leftovers(location) == [], "a failed save left files"
    assert_good_order(location, kept_by(lines))
    if "doing aside:3" in lines:
        storage = open_storage(location)
        assert 3 in storage.steps() or storage.quarantined(), "a quarantined checkpoint was lost"


def kept_by(lines: list[str]) -> set[int]:
    """Return the steps that were acknowledged, and neither removed nor quarantined since."""
    kept: set[int] = set()
    for line in lines:
        state, name, step = line.replace(":", " ").split()[:3]
        if state == "done" and name.startswith("commit"):
            kept.add(int(step))
        elif name in ("remove", "aside"):
            kept.discard(int(step))
    return kept
