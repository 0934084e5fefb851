"""The fork server: loads the libraries and the cases once; every rank of every run is a fork of it.

    python -m compatibility.server SOCKET

Each connection carries one JSON request and its answer. `{"cases": true}` lists the table; an `Order` runs a case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from infra.ports import free_port

# Time that the other ranks have to report their own failure once one rank has failed.
_AFTER_FAILURE_S = 3.0


def main() -> None:
    from compatibility.table import load_cases

    cases = load_cases()
    import compatibility.tiny as tiny

    tiny.tokenizer()
    gc.collect()
    gc.freeze()
    # Runs are waited for by nobody but the connection.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    parent = os.getppid()
    listener.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with connection, connection.makefile("rw") as stream:
                request = json.loads(stream.readline())
                answer = [_described(one) for one in cases.values()] if "cases" in request else _run(cases, request)
                stream.write(json.dumps(answer) + "\n")
            os._exit(0)
        connection.close()


def _described(case: Any) -> dict[str, Any]:
    fields = {one.name: getattr(case, one.name) for one in dataclasses.fields(case) if one.name != "body"}
    return {**fields, "verdict": dataclasses.asdict(case.verdict), "missing": case.missing}


def _run(cases: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks of a case and wait for all; returns their exit statuses, and whether they hung."""
    from compatibility.ranks import Order

    ranks, timeout_s = request.pop("ranks"), request.pop("timeout_s")
    case = dataclasses.replace(cases[request["case"]], ranks=ranks, timeout_s=timeout_s)
    order = Order(**{**request, "kill": request["kill"] and tuple(request["kill"])})
    os.setsid()
    folder = Path(order.folder)
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    port = free_port()
    started = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _become_rank(case, order, rank, port)
        started[pid] = rank
    statuses: dict[int, int] = {}
    until, hung = time.monotonic() + case.timeout_s, False
    while started:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in started:
            statuses[started.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code:
                until = min(until, time.monotonic() + _AFTER_FAILURE_S)
        elif time.monotonic() > until:
            hung = not any(statuses.values())
            for left in started:
                os.kill(left, signal.SIGKILL)
            until = float("inf")
        elif pid == 0:
            time.sleep(0.01)
    # Data loaders' workers.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGTERM)
    return {"statuses": statuses, "hung": hung}


def _become_rank(case: Any, order: Any, rank: int, port: int) -> None:
    from compatibility.ranks import run_case

    folder = Path(order.folder)
    log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    # The agent creates its socket there, and the path of a socket must be short.
    os.environ["TMPDIR"] = str(folder / "tmp")
    import tempfile

    tempfile.tempdir = None
    if case.ranks > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(case.ranks),
            "LOCAL_WORLD_SIZE": str(case.ranks),
        }
    code = 1
    try:
        code = run_case(case, order)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
