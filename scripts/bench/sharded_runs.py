"""Runs of `sharded_worker.py` on one or two nodes, which are torchruns of one machine, and a large export."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_runs import PeakMemory
from common import ROOT, Progress, scratch_folder

sys.path.append(str(ROOT / "tests"))
from infra.ports import free_port

from checkpointing.commit.commit_steps import StagedFile
from checkpointing.commit.protocol import commit_snapshot
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

WORKER = Path(__file__).with_name("sharded_worker.py")


@dataclass(frozen=True)
class Layout:
    """Nodes, and ranks of each."""

    nodes: int
    ranks: int


class ShardedRuns:
    """Runs workers, one training at a time.

    Args:
        scratch: A folder on the disk under test.
        shape: Width and number of layers of the model.
        say: Prints progress.
    """

    def __init__(self, scratch: Path, shape: tuple[int, int], say: Progress | None = None) -> None:
        self.scratch, self.shape, self.say = scratch, shape, say or Progress()

    def work(
        self,
        action: str,
        method: str,
        folder: str,
        layout: Layout,
        *,
        steps: int,
        save_every: int = 1,
        environments: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> dict[str, Any]:
        """Run one training, or one load.

        Returns:
            The figures of rank 0, and the peak memory of all processes as `peak_bytes`.
        """
        port = free_port()
        logs = [self.scratch / f"node-{number}.log" for number in range(layout.nodes)]
        with contextlib.ExitStack() as stack:
            nodes = []
            for number, log in enumerate(logs):
                command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={layout.nodes}"]
                command += [f"--nproc-per-node={layout.ranks}", f"--node-rank={number}", "--master-addr=127.0.0.1"]
                command += [f"--master-port={port}", str(WORKER), action, method, folder]
                command += [str(steps), str(save_every), *map(str, self.shape)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environments[number]}
                errors = stack.enter_context(log.open("w"))
                nodes.append(
                    subprocess.Popen(
                        command,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env=environment,
                        start_new_session=True,
                    )
                )
                stack.callback(_end, nodes[-1])
            memory = PeakMemory(*(node.pid for node in nodes))
            memory.start()
            # One reader per node: the ranks of torchrun decide which of them has rank 0.
            answers: list[str] = []
            readers = [threading.Thread(target=_read, args=(node, answers)) for node in nodes]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            peak = memory.stop()
            if not answers:
                raise SystemExit(f"{method} failed:\n" + "".join(log.read_text()[-3000:] for log in logs))
        figures: dict[str, Any] = json.loads(answers[0])
        return {**figures, "peak_bytes": peak}

    def export_memory(self, nbytes: int) -> float:
        """Return the memory in MB that `runner checkpoints export` takes for a sharded checkpoint of that size."""
        with scratch_folder(self.scratch) as folder:
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


def _read(node: subprocess.Popen[str], answers: list[str]) -> None:
    assert node.stdout is not None
    answers += [line.removeprefix("RESULT ") for line in node.stdout if line.startswith("RESULT ")]
    node.wait()


def _end(node: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


def write_sharded(storage: LocalStorage, nbytes: int, num_shards: int = 8) -> None:
    """Commit a checkpoint whose model and optimizer are spread by rows over shards, without a model.

    Args:
        storage: Where to.
        nbytes: Its size; a third of it is the model.
        num_shards: Number of shards.
    """
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
