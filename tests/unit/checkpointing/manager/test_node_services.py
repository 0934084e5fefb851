"""What is made with the connection to the node's agent: when it is first used, and once."""

from __future__ import annotations

from pathlib import Path

from unit.checkpointing.doubles import Connection, options

from checkpointing.host.heartbeat import Phase
from checkpointing.manager.node_services import NodeServices
from checkpointing.process.ranks import Ranks


def test_nothing_is_reached_before_something_is_used(tmp_path: Path) -> None:
    connection = Connection(tmp_path)
    node = NodeServices(options(tmp_path), Ranks(), connection)
    assert not node.is_connected and connection.num_connected == 0
    assert node.restorer is node.restorer and node.snapshots is node.snapshots and node.reporter is node.reporter
    assert node.is_connected and connection.num_connected == 1
    node.snapshots.close()


def test_signs_of_life_are_on_the_agents_page(tmp_path: Path) -> None:
    connection = Connection(tmp_path)
    node = NodeServices(options(tmp_path), Ranks(), connection)
    node.heartbeat.write(Phase.TRAINING, 7)
    assert (connection.client.beat.phase, connection.client.beat.step) == (Phase.TRAINING, 7)
