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
from checkpointing.agent.options import EXIT_DELAYED, AgentOptions
from checkpointing.agent.server import Agent
from checkpointing.commit.tiers import open_tiers
from checkpointing.errors import may_pass
from checkpointing.host.limits import explained

_NICENESS = 10
# Lowest of the best-effort class (ioprio_set(2)).
_IO_PRIORITY = 7
_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    """Run an agent until it is stopped.

    Args:
        argv: Arguments; None for those of this process.

    Returns:
        The exit status: 0 if the newest snapshot is committed, or there is none.
    """
    parser = argparse.ArgumentParser(prog="checkpointing.agent", description="Checkpoint agent of one node.")
    parser.add_argument("--options", required=True, metavar="JSON", help="agent options, as AgentOptions.to_json")
    parser.add_argument("--socket", required=True, metavar="PATH", help="where to listen")
    parser.add_argument("--ready-fd", type=int, required=True, help="descriptor to report readiness on")
    parser.add_argument("--parent-pid", type=int, required=True, help="process to end with")
    arguments = parser.parse_args(argv)

    # A parent that is killed must not take uncommitted snapshots with it: drain, then exit.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != arguments.parent_pid:
        return 0  # The parent ended before the call above.
    _yield_to_training()

    def report(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(arguments.ready_fd, text.encode())
        os.close(arguments.ready_fd)

    try:
        options = AgentOptions.from_json(arguments.options)
        tiers = open_tiers(options.location, options.local_tier)
        for storage in tiers.nearest_first:
            if storage.root is not None and options.commits:
                acquire_lock(storage.root, LOCK_TIMEOUT_S, patience_s=options.patience_s)
        listener = protocol.listen(arguments.socket)
        agent = Agent(listener, tiers, options)
    except (OSError, ValueError, RuntimeError) as error:
        limit = explained(str(error))
        if isinstance(error, RuntimeError) and not limit:
            raise
        report(f"error {error}{limit}")
        # Another agent commits still, a file system does not work, or no thread can be started.
        return EXIT_DELAYED if may_pass(error) or limit else 1
    # A signal that comes in the moment before the agent waits must end that wait, too.
    signal.set_wakeup_fd(agent.wakeup_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    report("ready")
    written = agent.run()
    with contextlib.suppress(OSError):
        Path(arguments.socket).unlink()
        # The parent removes the socket's folder, unless it was killed.
        Path(arguments.socket).parent.rmdir()
    return 0 if written else 1


def _yield_to_training() -> None:
    """Leave the terminal's signals, the processor and the disk to the ranks."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, _IO_PRIORITY)


if __name__ == "__main__":
    sys.exit(main())
