"""All-reduce over the real rendezvous: started by torchrun, with as many ranks as the run will have."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpointing.host.interpreter import module_command
from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn

# Seconds to start the ranks and to measure, once all nodes have joined.
_TRIAL_S = 180.0
_SLOW = 1.3
_NETWORK = (
    "open the ports between the nodes, and set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to their network interface"
)


def check_collectives(config: Config, nnodes: int, nproc: int) -> Iterator[Finding]:
    """Run all-reduce on all ranks; with several nodes, every node calls this at about the same time."""
    if nnodes * nproc < 2:
        yield ok("all-reduce", "not needed with one rank")
        return
    launch = config.launch
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        # Not torchrun's c10d, which unpickles what strangers write to its store.
        host, port = launch.rendezvous_address if nnodes > 1 else ("127.0.0.1", _free_port())
        command = [
            *module_command("torch.distributed.run", "--nnodes", str(nnodes), "--nproc-per-node", str(nproc)),
            *("--rdzv-backend", "static", "--rdzv-conf", f"timeout={launch.rendezvous_timeout_s:.0f}"),
            *("--node-rank", str(launch.node_rank), "--master-addr", host, "--master-port", str(port)),
            *("-m", "runner.doctor.all_reduce", str(answer)),
        ]
        limit_s = _TRIAL_S + (launch.rendezvous_timeout_s if nnodes > 1 else 0)
        # A scheduler may set RANK and the like for the runner; torchrun sets its own for the ranks.
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if "-P" in command:
            environment["PYTHONSAFEPATH"] = "1"  # for what torchrun starts
        error = _run(command, environment, log, limit_s)
        if error is not None:
            yield fail("all-reduce", error, _NETWORK)
        else:
            yield from judge(json.loads(answer.read_text()))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def judge(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge what the ranks measured, as `runner.doctor.all_reduce` writes it."""
    ranks = measured["ranks"]
    wrong = [str(rank["rank"]) for rank in ranks if not rank["right"]]
    if wrong:
        text = f"{measured['backend']} computes wrong sums on rank {', '.join(wrong)}"
        yield fail(
            "all-reduce", text, "exclude that node; try NCCL_P2P_DISABLE=1 to see whether its GPU links are faulty"
        )
        return
    # A collective is as fast as its slowest rank.
    rates = {int(size): min(rank["bandwidth"][size] for rank in ranks) for size in ranks[0]["bandwidth"]}
    listed = ", ".join(f"{rate / 1e9:.2f} GB/s at {size >> 20} MiB" for size, rate in sorted(rates.items()))
    yield ok("all-reduce", f"correct on {len(ranks)} ranks over {measured['backend']}; bus bandwidth {listed}")
    usual = statistics.median_low(rank["compute_s"] for rank in ranks)
    slow = [rank for rank in ranks if rank["compute_s"] > _SLOW * usual]
    for rank in slow:
        times = f"{rank['compute_s'] / usual:.1f}"
        text = f"rank {rank['rank']} on {rank['host']} takes {times} times as long as the others"
        yield warn("speed of ranks", text, "check that node's other processes, clock speed and cooling, or exclude it")
    if not slow:
        yield ok("speed of ranks", f"equal within {100 * (_SLOW - 1):.0f} %")


def _run(command: list[str], environment: Mapping[str, str], log: Path, limit_s: float) -> str | None:
    """Run the command; return what went wrong, or None."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s: a node is missing, or packets are lost"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == 0:
        return None
    # The first error is the cause; later ones come from ranks that lost their peer.
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (errors or lines or ["no reason given"])[0][-300:]
