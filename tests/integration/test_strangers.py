"""A stranger at every port of a run: no code runs, no text of his is obeyed, and the run ends in the same bits."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from helpers.bomb import Bomb
from infra.ports import free_port
from integration.support import Run, script, state_hash
from torch._C._distributed_c10d import TCPStore

# The port, and the address at which it can be reached.
Address = tuple[str, int]
TERMINAL = b"\x1b]0;a stranger\x07\x1b[2J\x1b[31m"
# What the first bytes of a client of torch's store mean: it speaks the protocol; the key has so many bytes.
STORE_CLIENT = struct.pack("<BI", 0, 0x3C85F7CE)
STORE_SET, STORE_PING = b"\x01", b"\x0d"
MESSAGES = (
    bytes(range(256)) * 16,
    TERMINAL + b"\n",
    b"GET /metrics HTTP/1.0\r\nHost: " + TERMINAL + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n",
    b"\xff" * 8,
    struct.pack("<Q", 2**62),
    struct.pack(">I", 2**31 - 1),
    STORE_CLIENT + STORE_SET + struct.pack("<Q", 2**63 - 1) + b"torch.rendezvous",
    STORE_CLIENT + bytes([255]),
    b'{"do": "stop", "reason": "says a stranger"}\n',
    b"proof " + b"ab" * 32 + b" " + b"ab" * 32 + b"\n",
    # A connection that says nothing, and stays.
    b"",
)
# Seconds that a stranger waits for an answer.
PATIENCE_S = 5


@contextlib.contextmanager
def run_of(num_nodes: int, folder: Path) -> Iterator[list[Run]]:
    """Two ranks that wait after their 20th step, on one node or one on each of two nodes, all on this machine."""
    lines = script(folder, gate=20)
    options: list[list[str]] = [[]]
    if num_nodes == 2:
        common = ["--nnodes", "2", "--nproc-per-node", "1", "--set", f"launch.peer_port={free_port()}"]
        common += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        options = [[*common, "--node-rank", str(node)] for node in (0, 1)]
    options[0] += ["--metrics-port", str(free_port())]
    # While strangers act, the ranks wait longer than a step takes.
    patient = ["--set", "restart.hang_timeout_s=600"]
    nodes = [Run(folder / "run", *own, *patient, script=lines) for own in options]
    try:
        for node in nodes:
            node.start()
        # Logged at each seventh step.
        nodes[0].wait_for_step(14)
        yield nodes
    finally:
        for node in nodes:
            if node.process is not None and node.process.poll() is None:
                os.killpg(node.process.pid, signal.SIGKILL)
                node.process.communicate()


def ports_of(nodes: list[Run]) -> list[Address]:
    """Return where the processes of a run listen."""
    pids = {node.process.pid for node in nodes if node.process is not None}
    pids |= {process.pid for node in nodes for process in node.processes()}
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in psutil.Process(pid).net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    host, port = connection.laddr
                    found.add(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port))
    return sorted(found)


def send(address: Address, message: bytes, kept: contextlib.ExitStack) -> None:
    """Say it, and leave the connection open."""
    with contextlib.suppress(OSError):
        connection = kept.enter_context(socket.create_connection(address, PATIENCE_S))
        connection.sendall(message)


def is_store(address: Address) -> bool:
    """Whether torch's store is there: it sends a number back. A client of torch's waits for ever for what is none."""
    number = os.urandom(4)
    try:
        with socket.create_connection(address, PATIENCE_S) as connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(STORE_CLIENT + STORE_PING + number)
            return connection.recv(4, socket.MSG_WAITALL) == number
    except OSError:
        return False


def write_to_store(address: Address, value: bytes) -> int:
    """Write where torchrun's c10d keeps its state, and over what our nodes have met by; return how many keys that were.

    The keys need not be known: a store lists them.
    """
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    met = [key for key in store.list_keys() if key.endswith("/ranks_address")]
    runs = {key.partition("/")[0] for key in met} or {"run-1"}
    keys = [*met, *(f"torch.rendezvous.{run}" for run in runs)]
    for key in keys:
        store.set(key, base64.b64encode(value).decode())
    return len(keys)


def finish(nodes: list[Run], folder: Path) -> list[int]:
    (folder / "hf.open").touch()
    return [node.finish() for node in nodes]


def assert_undisturbed(nodes: list[Run], codes: list[int], like: Run) -> None:
    assert codes == [0] * len(nodes), "\n----\n".join(node.output for node in nodes)
    assert [event["kind"] for event in nodes[0].events("attempt_ended")] == ["finished"]
    assert state_hash(nodes[0].checkpoint(60)) == state_hash(like.checkpoint(60))
    assert not any("\x1b" in node.output for node in nodes)
    assert not any(node.leftovers() for node in nodes)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_strangers_send_changes_nothing(num_nodes: int, untouched_script: Run, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with run_of(num_nodes, tmp_path) as nodes, contextlib.ExitStack() as kept:
        addresses = ports_of(nodes)
        # torch's two stores, the metrics, and the runners' port where there are several.
        assert len(addresses) >= 2 + num_nodes, addresses
        for address in addresses:
            for message in (*MESSAGES, pickle.dumps(Bomb(marker))):
                send(address, message, kept)
        codes = finish(nodes, tmp_path)
    assert not marker.exists(), marker.read_text()
    assert_undisturbed(nodes, codes, untouched_script)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_strangers_write_into_torchs_store_changes_nothing(
    num_nodes: int, untouched_script: Run, tmp_path: Path
) -> None:
    """A launcher of torchrun reads the state every 5 s, and once more at the end."""
    marker = tmp_path / "ran"
    with run_of(num_nodes, tmp_path) as nodes:
        bomb = pickle.dumps(Bomb(marker))
        addresses = ports_of(nodes)
        with ThreadPoolExecutor(len(addresses)) as pool:
            stores = [address for address, found in zip(addresses, pool.map(is_store, addresses), strict=True) if found]
        assert sum(write_to_store(address, bomb) for address in stores) > 0, f"stores: {stores} of {addresses}"
        codes = finish(nodes, tmp_path)
    assert not marker.exists(), marker.read_text()
    assert_undisturbed(nodes, codes, untouched_script)
