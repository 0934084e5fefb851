"""Runs of the worker on one or two nodes, which are torchruns of one machine, and a large export."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from library.benchmark import ROOT
from library.measuring import peak_of_processes, scratch_folder
from library.orders import order
from library.workers import ENVIRONMENT, TORCHRUN, free_port, results_in, started

from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.format.digest import PART_BYTES, digest_buffer, digest_of_parts, part_digests
from checkpointing.format.manifest import SnapshotInfo
from checkpointing.format.shard_index import (
    INDEX_NAME,
    Piece,
    ShardIndex,
    ShardParts,
    SpreadFile,
    parts_name,
    shard_name,
)
from checkpointing.storage import LocalStorage

WORKER = Path(__file__).with_name("worker.py")


def work(
    scratch: Path,
    shape: tuple[int, int],
    action: str,
    method: str,
    folder: str,
    layout: tuple[int, int],
    *,
    steps: int,
    save_every: int = 1,
    environments: Sequence[dict[str, str]] = ({}, {}),
) -> dict[str, Any]:
    """Run one training, or one load, on so many nodes of so many ranks.

    Returns:
        The figures of rank 0, and the peak memory of all processes as `peak_bytes`.
    """
    port, (num_nodes, num_ranks) = free_port(), layout
    logs = [scratch / f"node-{number}.log" for number in range(num_nodes)]
    width, layers = shape
    how = {"steps": steps, "save_every": save_every, "width": width, "layers": layers}
    what = order(WORKER, action, method=method, folder=folder, **how)
    with contextlib.ExitStack() as stack:
        nodes = []
        for number, log in enumerate(logs):
            where = [f"--nnodes={num_nodes}", f"--nproc-per-node={num_ranks}", f"--node-rank={number}"]
            where += ["--master-addr=127.0.0.1", f"--master-port={port}"]
            node = started([*TORCHRUN, *where, *what], log, ENVIRONMENT | environments[number])
            nodes.append(stack.enter_context(node))
        # One reader per node: the ranks of torchrun decide which of them has rank 0.
        with peak_of_processes(*(node.pid for node in nodes)) as peak, ThreadPoolExecutor() as readers:
            outputs = readers.map(lambda node: node.communicate()[0], nodes)
            answers = [answer for output in outputs for answer in results_in(output)]
    if not answers:
        raise SystemExit(f"{method} failed:\n" + "".join(log.read_text()[-3000:] for log in logs))
    return {**answers[0], "peak_bytes": peak.nbytes}


def export_memory(scratch: Path, nbytes: int) -> float:
    """Return the memory in MB that `runner checkpoints export` takes for a sharded checkpoint of that size."""
    with scratch_folder(scratch) as folder:
        write_sharded(LocalStorage(folder / "run"), nbytes)
        command = [sys.executable, "-m", "runner", "checkpoints", "export", str(folder / "run"), "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*command, str(folder / "out")], env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            raise SystemExit("runner checkpoints export failed")
        exported = sum(path.stat().st_size for path in (folder / "out").iterdir())
        assert exported >= nbytes, (exported, nbytes)
        return usage.ru_maxrss * 1024 / 1e6


def write_sharded(storage: LocalStorage, nbytes: int, num_shards: int = 8) -> None:
    """Commit a checkpoint of that size, a third of it the model, whose files are spread by rows over shards."""
    rows = -(-nbytes // 3 // num_shards)
    header = json.dumps(
        {
            f"layer.{number}": {"dtype": "U8", "shape": [rows], "data_offsets": [number * rows, (number + 1) * rows]}
            for number in range(num_shards)
        }
    ).encode()
    header = len(header).to_bytes(8, "little") + header
    sizes = {"model.safetensors": len(header) + num_shards * rows, "optimizer.pt": 2 * num_shards * rows}
    holdings = []
    for rank in range(num_shards):
        weights = SpreadFile(
            sizes["model.safetensors"],
            (Piece(0, len(header)),) if rank == 0 else (),
            (Piece(len(header) + rank * rows, rows),),
        )
        moments = SpreadFile(sizes["optimizer.pt"], (), (Piece(2 * rank * rows, 2 * rows),))
        holdings.append(ShardIndex({"model.safetensors": weights, "optimizer.pt": moments}))
    index, shard_sizes = ShardIndex.laid_out(holdings)
    block = memoryview(os.urandom(PART_BYTES))
    files = [_staged(INDEX_NAME, index.to_json()), _staged("rng_state.pth", b"generators")]
    for rank, size in enumerate(shard_sizes):
        # The header is in the first shard's first bytes, and so is not at a border of parts.
        head = header.ljust(-(-len(header) // 64) * 64) if rank == 0 else b""
        parts = _pieces(head, size, block)
        digests = tuple(part_digests(part, [0])[0] for part in parts())
        note = ShardParts(size, digests)
        files.append(StagedFile(shard_name(rank), parts(), lambda digests=digests: digest_of_parts(digests)))  # type: ignore[misc]
        files.append(_staged(parts_name(shard_name(rank)), note.to_json()))
    commit_snapshot(storage, SnapshotInfo("bench", 1, 1, num_shards, 1), files)


def _staged(name: str, data: bytes) -> StagedFile:
    return StagedFile(name, [memoryview(data)], lambda: digest_buffer(data))


def _pieces(head: bytes, size: int, block: memoryview) -> Any:
    """Return a function that yields a shard part by part: its head, then the block again and again."""
    first = memoryview(head + bytes(block))[:PART_BYTES]

    def parts() -> Iterator[memoryview]:
        for start in range(0, size, PART_BYTES):
            yield (first if start == 0 else block)[: size - start]

    return parts
