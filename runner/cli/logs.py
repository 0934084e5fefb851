"""The command `runner logs`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from runner.cli.inspect import newest_run
from runner.errors import UsageError

_LOOK_EVERY_S = 0.2
_PIECE_BYTES = 1 << 20
# Of a rank; torchrun's own folders of local ranks, in runs that began with an older version.
_PATTERNS = ("rank*/std*.log", "*/attempt_0/*/std*.log")


@click.command()
@click.argument("location", required=False)
@click.option("-f", "--follow", is_flag=True, help="Print what is appended until the run ends, also by later attempts.")
@click.option("--rank", "ranks", type=int, multiple=True, metavar="N", help="Only this rank; may be repeated.")
@click.option("--attempt", type=int, metavar="N", help="Attempt whose output is printed (default: the newest).")
def logs(location: str | None, follow: bool, ranks: tuple[int, ...], attempt: int | None) -> None:
    """Print what the ranks of a run have written to standard output and error.

    LOCATION is the folder of the run (default: $OUTPUT_DIR, or the newest run in ./runs), in a run of several nodes
    also the folder node-N in it. Where several ranks are shown, each line begins with its rank.
    """
    from runner.journal.journal import JOURNAL_NAME, JournalReader
    from runner.ui.status import has_ended

    folder = Path(location if location is not None else newest_run())
    reader = JournalReader(folder / JOURNAL_NAME)
    if not reader.entries():
        raise UsageError(f"{str(folder)!r} holds no run; give the folder of one, its --output-dir")
    printed = _Printed()
    shown = attempt
    while True:
        # Asked first: what is written last is printed, too.
        entries = reader.entries()
        over = has_ended(entries)
        newest = attempt or max((entry.attempt for entry in entries), default=0)
        for number in range(shown or newest, newest + 1):
            by_rank = logs_of(folder / "logs", number)
            if number == newest and not follow:
                _check(by_rank, ranks, number)
            is_last = not follow or over or number < newest
            for rank, paths in by_rank.items():
                if not ranks or rank in ranks:
                    for path in paths:
                        prefix = f"[rank {rank}] " if len(by_rank) > 1 and len(ranks) != 1 else ""
                        printed.print_new(path, prefix, is_last=is_last)
        shown = newest
        if not follow or over:
            return
        time.sleep(_LOOK_EVERY_S)


def _check(by_rank: dict[int, list[Path]], ranks: tuple[int, ...], attempt: int) -> None:
    if not by_rank:
        raise UsageError(f"attempt {attempt} has no output here; older attempts' may have been removed")
    if missing := sorted(set(ranks) - by_rank.keys()):
        raise UsageError(f"there is no rank {missing[0]} here; there are {', '.join(map(str, sorted(by_rank)))}")


class _Printed:
    """Prints files that grow, whole lines at a time, and what is left at the end."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def print_new(self, path: Path, prefix: str, *, is_last: bool) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while data := file.read(_PIECE_BYTES):
                # A line that is not whole yet is printed later, unless it is longer than a piece or the last one.
                is_rest = len(data) == _PIECE_BYTES or is_last
                length = data.rfind(b"\n") + 1 or (len(data) if is_rest else 0)
                if not length:
                    break
                # At these ends alone: a progress bar is one line.
                for line in data[:length].removesuffix(b"\n").split(b"\n"):
                    click.echo(prefix.encode() + line)
                file.seek(length - len(data), os.SEEK_CUR)
            self._offsets[path] = file.tell() - len(data)


def logs_of(folder: Path, attempt: int | None) -> dict[int, list[Path]]:
    """Return the files with the output of each rank of an attempt (default: the newest) on a node, by rank."""
    attempts = {
        int(number): path
        for path in folder.glob("attempt-*")
        if (number := path.name.removeprefix("attempt-")).isdecimal()
    }
    if not attempts:
        return {}
    found: dict[int, list[Path]] = {}
    chosen = attempts.get(attempt or max(attempts), Path(folder, "none"))
    for path in (path for pattern in _PATTERNS for path in chosen.glob(pattern)):
        if (number := path.parent.name.removeprefix("rank")).isdecimal():
            found.setdefault(int(number), []).append(path)
    return {rank: sorted(paths) for rank, paths in sorted(found.items())}
