"""The command `runner`, also as `python -m runner`."""

from __future__ import annotations

import sys

from checkpointing.extras import not_installed
from runner.errors import ExitCode


def main() -> None:
    """As `runner.cli.main.main`; one line where the packages of the supervisor are not installed."""
    try:
        from runner.cli.main import main as run

        run()
    except ModuleNotFoundError as error:
        # One of our own modules missing is a fault of ours.
        if error.name is None or error.name.partition(".")[0] in ("runner", "checkpointing"):
            raise
        print(f"runner: error: {not_installed(error.name, 'runner')}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)


if __name__ == "__main__":
    main()
