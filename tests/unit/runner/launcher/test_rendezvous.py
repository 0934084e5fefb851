"""How the nodes of an attempt meet: often enough, and no sooner than the store listens."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from runner.launcher import rendezvous


@pytest.mark.parametrize(("nnodes", "seconds"), [(1, 0.02), (3, 0.02), (100, 0.2), (5000, 1.0)])
def test_nodes_look_for_each_other_often_but_do_not_flood_the_store(
    nnodes: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's nodes looked once a second, which was most of a recovery on several nodes."""
    torchs: Any = dynamic_rendezvous
    holder = torchs._BackendRendezvousStateHolder
    before = holder.__init__.__defaults__
    monkeypatch.setattr(torchs, "_delay", torchs._delay)
    monkeypatch.setattr(torchs, "get_method_name", torchs.get_method_name)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    try:
        rendezvous.meet_at_once(nnodes)
        torchs._delay(seconds=1)
        torchs._delay(seconds=(0, 0.3))
        # What was seen a moment ago is asked for again.
        assert holder(None, None)._cache_duration == 0
    finally:
        holder.__init__.__defaults__ = before
    assert slept == pytest.approx([seconds, seconds])


def test_records_of_the_rendezvous_do_not_inspect_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole stacks for each record that nothing reads took 0.3 s of the pause in which a node joined."""
    torchs: Any = dynamic_rendezvous
    monkeypatch.setattr(torchs, "_delay", torchs._delay)
    monkeypatch.setattr(torchs, "get_method_name", torchs.get_method_name)
    monkeypatch.setattr(torchs.inspect, "stack", lambda: pytest.fail("the stack was inspected"))
    rendezvous.meet_at_once(3)
    names: list[str] = []
    monkeypatch.setattr(torchs, "construct_and_record_rdzv_event", lambda *, name, **_: names.append(name))
    handler = object.__new__(torchs._DistributedRendezvousOpExecutor)
    handler._node, handler._settings = torchs._NodeDesc("node0", 1, 0), SimpleNamespace(run_id="run")
    handler._state = SimpleNamespace(closed=False)
    handler._mark_rendezvous_closed()
    # The name that torch itself finds.
    assert names == ["_DistributedRendezvousOpExecutor._mark_rendezvous_closed"]


def test_a_store_is_waited_for_until_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tries at once, and then most of a second later."""
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        port, slept = late.getsockname()[1], list[float]()

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                late.listen()

        monkeypatch.setattr(time, "sleep", sleep)
        rendezvous.await_store(f"127.0.0.1:{port}")
        assert slept == [0.02] * 3


def test_a_store_that_never_listens_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with socket.socket() as never:
        never.bind(("127.0.0.1", 0))
        rendezvous.await_store(f"[127.0.0.1]:{never.getsockname()[1]}")
    assert 1.0 <= now[0] < 1.1


def test_an_endpoint_without_a_port_is_left_to_torch() -> None:
    rendezvous.await_store("node0")
