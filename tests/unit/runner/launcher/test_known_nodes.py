"""Nodes that know each other meet at a store of the leader's; nothing that is written there is executed."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from runner.launcher import known_nodes
from runner.launcher.rendezvous import BACKEND, Meeting


def handler(meeting: Meeting, run_id: str = "run-1") -> Any:
    known_nodes.register()
    parameters = RendezvousParameters(BACKEND, "", run_id, meeting.nnodes, meeting.nnodes, timeout=9, **vars(meeting))
    return rendezvous_handler_registry.create_handler(parameters)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def meetings(nnodes: int, leader: int, port: int) -> list[Meeting]:
    return [
        Meeting("127.0.0.1", port, place == leader, "127.0.0.1", "", place, nnodes, timeout_s=60)
        for place in range(nnodes)
    ]


@pytest.mark.parametrize(("nnodes", "leader"), [(1, 0), (2, 0), (2, 1), (3, 2), (4, 1)])
def test_every_node_has_its_place_and_finds_the_store_of_the_ranks(nnodes: int, leader: int) -> None:
    handlers = [handler(meeting) for meeting in meetings(nnodes, leader, free_port())]
    with ThreadPoolExecutor(nnodes) as pool:
        found = list(pool.map(lambda one: one.next_rendezvous(), handlers))
    assert [info.rank for info in found] == list(range(nnodes))
    assert {info.world_size for info in found} == {nnodes}
    found[0].store.set("key", "of node 0")
    assert all(info.store.get("key") == b"of node 0" for info in found)
    (address,) = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in found}
    assert TCPStore(*address, is_master=False).add("ranks", 1) == 1


def test_each_attempt_has_a_new_store_for_its_ranks_at_the_same_port() -> None:
    """Keys of an earlier attempt would be taken for those of this one."""
    port, ports = free_port(), []
    for attempt in (1, 2, 3):
        handlers = [handler(meeting, f"run-{attempt}") for meeting in meetings(2, 0, port)]
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda one: one.next_rendezvous(), handlers)
        assert first.store.add("barrier", 1) == 1 and second.store.add("barrier", 1) == 2
        ranks = TCPStore("127.0.0.1", first.bootstrap_store_info.master_port, is_master=False)
        assert ranks.add("rank", 1) == 1
        ports.append(first.bootstrap_store_info.master_port)
    # Earlier ones are gone, or nobody knows their ports.
    assert len(ports) == 3


def test_what_a_stranger_writes_is_not_executed(tmp_path: Path) -> None:
    """torchrun's nodes unpickle the state of their rendezvous: code of a stranger ran on all of them."""
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> Any:
            return marker.touch, ()

    port = free_port()
    leader, member = (handler(meeting) for meeting in meetings(2, 0, port))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(leader.next_rendezvous)
        stranger: Any = TCPStore("127.0.0.1", port, is_master=False)
        # Where torch's c10d rendezvous keeps its state, and our own keys.
        for key in ("torch.rendezvous.run-1", "run-1/torch.rendezvous.run-1", "run-1/anything"):
            stranger.set(key, pickle.dumps(Bomb()))
        second = pool.submit(member.next_rendezvous)
        assert {first.result().rank, second.result().rank} == {0, 1}
    assert not marker.exists()


def test_a_port_that_a_stranger_wrote_is_a_number_or_an_error() -> None:
    port = free_port()
    leader, member = (handler(meeting, "run-9") for meeting in meetings(2, 0, port))
    leader.next_rendezvous()
    stranger: Any = TCPStore("127.0.0.1", port, is_master=False)
    stranger.set("run-9/ranks_address", b"\x80\x04.")
    with pytest.raises(ValueError, match="not enough values"):
        member.next_rendezvous()


def test_a_run_on_one_node_listens_on_loopback_only() -> None:
    info = handler(Meeting("127.0.0.1", 0, True, "127.0.0.1", "", 0, 1, timeout_s=60)).next_rendezvous()
    port = info.bootstrap_store_info.master_port
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=10):
        pass


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
        known_nodes._await_store("127.0.0.1", port)
        assert slept == [0.02] * 3


def test_a_store_that_never_listens_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with socket.socket() as never:
        never.bind(("127.0.0.1", 0))
        known_nodes._await_store("127.0.0.1", never.getsockname()[1])
    assert 1.0 <= now[0] < 1.1


def test_a_node_that_comes_first_waits_for_the_leader() -> None:
    port = free_port()
    leader, member = (handler(meeting, "late") for meeting in meetings(2, 0, port))
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(member.next_rendezvous)
        threading.Event().wait(0.1)
        leader.next_rendezvous()
        assert early.result().rank == 1
