"""The command `runner`, also as `python -m runner`."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from checkpointing.host.environment import not_installed
from runner.errors import ExitCode


def main() -> None:
    """Run the command line; report missing packages in one line."""
    # What a command has started, and its temporary files, end with it, as at Ctrl-C; `start` stops in its own way.
    signal.signal(signal.SIGTERM, _end)
    try:
        from runner.cli.main import main as run

        run()
    except ModuleNotFoundError as error:
        # A missing module of this distribution is a bug, which deserves its traceback.
        if error.name is None or error.name.partition(".")[0] in ("runner", "checkpointing"):
            raise
        print(f"runner: error: {not_installed(error.name, 'runner')}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)


def _end(number: int, _: FrameType | None) -> None:
    # Once: what cleans up is not interrupted.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
