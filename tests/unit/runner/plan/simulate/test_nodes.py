"""Which nodes a simulated run has as time passes."""

from __future__ import annotations

import math

from runner.plan.simulate.nodes import Nodes
from runner.plan.simulate.scenario import Scenario

BASE = Scenario(work_s=1.0, mttf_s=1.0, nodes=4, min_nodes=2, node_wait_s=100.0, grow_interval_s=30.0)


def test_lost_nodes_come_back_one_by_one() -> None:
    nodes = Nodes(BASE)
    assert nodes.growth_in == math.inf and nodes.share == 1
    assert nodes.lose() == 0 and nodes.share == 0.75 and nodes.growth_in == 100
    nodes.elapse(60)
    assert nodes.lose() == 0 and nodes.active == 2 and nodes.growth_in == 40
    # A third one is too many: the run waits for the first replacement.
    assert nodes.lose() == 40 and nodes.active == 2 and nodes.growth_in == 60
    nodes.elapse(100)
    assert nodes.spares == 2 and nodes.growth_in == 0
    nodes.grow()
    assert nodes.active == 4 and nodes.growth_in == math.inf


def test_no_node_is_admitted_sooner_than_the_interval_allows() -> None:
    nodes = Nodes(BASE.with_(node_wait_s=10.0))
    nodes.lose()
    assert nodes.growth_in == 30


def test_a_spare_replaces_a_lost_node_and_is_replaced_itself() -> None:
    nodes = Nodes(BASE.with_(spares=1, min_nodes=4))
    assert nodes.lose() == 0 and (nodes.active, nodes.spares) == (4, 0)
    assert nodes.lose() == 100 and (nodes.active, nodes.spares) == (4, 1)
