"""The process of the checkpoint agent: python -m checkpointing.agent."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

from checkpointing.agent import protocol
from checkpointing.agent.location_lock import LOCK_TIMEOUT_S, acquire_lock
from checkpointing.agent.server import Agent
from checkpointing.tiers import DEFAULT_LOCAL_KEEP_LAST, open_tiers

_NICENESS = 10
# Lowest of the best-effort class (ioprio_set(2)).
_IO_PRIORITY = 7
_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="checkpointing.agent", description="Checkpoint agent of one node.")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--location", required=True)
    parser.add_argument("--local-tier", help="a directory in front of the location")
    parser.add_argument("--local-keep-last", type=int, default=DEFAULT_LOCAL_KEEP_LAST)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--no-commit", action="store_true", help="hold snapshots only; another node commits")
    parser.add_argument("--memory-limit", type=int, help="bytes that snapshots may take; default: half of what is free")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True, help="ends with this process")
    arguments = parser.parse_args(argv)

    # A parent that dies without a word must not take uncommitted snapshots with it: drain, then end.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != arguments.parent_pid:
        return 0  # it has died before this one could ask to be told
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, _IO_PRIORITY)

    def report(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(arguments.ready_fd, text.encode())
        os.close(arguments.ready_fd)

    try:
        tiers = open_tiers(arguments.location, arguments.local_tier)
        for storage in tiers.nearest_first:
            if storage.root is not None and not arguments.no_commit:
                acquire_lock(storage.root, LOCK_TIMEOUT_S)
        listener = protocol.listen(arguments.socket)
    except (OSError, ValueError) as error:
        report(f"error {error}")
        return 1
    agent = Agent(
        listener,
        tiers,
        arguments.run_id,
        commits=not arguments.no_commit,
        memory_limit=arguments.memory_limit,
        local_keep_last=arguments.local_keep_last,
    )
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    report("ready")
    written = agent.run()
    with contextlib.suppress(OSError):
        Path(arguments.socket).unlink()
        # Its folder, which who started it removes, unless it was killed.
        Path(arguments.socket).parent.rmdir()
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
