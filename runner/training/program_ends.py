"""How a program ends its rank: calls that would end it without reporting, and an end in the middle of training."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

_EXEC = ("execv", "execve")
_STAYS_AFTER_S = 15.0
_STAYS_AGAIN_S = 300.0
_STDLIB = sysconfig.get_path("stdlib")


class ProcessReplaced(RuntimeError):
    """A program would put another one in the place of its rank."""


@contextlib.contextmanager
def heard_ends(report: Callable[[str], None]) -> Iterator[None]:
    """Hear of what would end this process at once: `os._exit` and the functions of `os` that replace the process.

    In a process that is forked from this one they do what they always do.

    Args:
        report: Takes the error of a rank that ends outside of its main thread, where nothing else can be said.

    Raises:
        ProcessReplaced: By the calls that replace the process, as nobody would see whether the new one trains.
        SystemExit: By `os._exit` in the main thread, so that what is left of a save is not lost.
    """
    own, rank = {name: getattr(os, name) for name in ("_exit", *_EXEC)}, os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() == rank:
            if threading.current_thread() is threading.main_thread():
                # As in the call that was meant, neither exit functions nor threads hold the process up.
                atexit._clear()
                setattr(threading, "_shutdown", lambda: None)  # noqa: B010 - the name is private
                raise SystemExit(status)
            report(f"SystemExit: a thread of the program called os._exit({status})")
            status = status or 1
        own["_exit"](status)
        raise AssertionError("os._exit has returned")

    def replacing(name: str) -> Callable[..., Any]:
        def replace(file: Any, *rest: Any) -> Any:
            if os.getpid() != rank:
                return own[name](file, *rest)
            raise ProcessReplaced(
                f"os.{name}({os.fspath(file)!r}) would replace this rank by another program, which nobody supervises: "
                "set what it is called for, such as variables of the environment, before runner start"
            )

        return replace

    os._exit = leave
    for name in _EXEC:
        setattr(os, name, replacing(name))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(os, name, function)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def name_what_stays(
    rank: int,
    say: Callable[[str], None] = _say,
    *,
    after_s: float = _STAYS_AFTER_S,
    again_s: float = _STAYS_AGAIN_S,
) -> None:
    """From now on say what keeps the process of a program that has ended: a thread of its own, or an exit function.

    It is waited for, as by Python: it may be an upload.

    Args:
        rank: Number of the rank, for people.
        say: Takes what is said.
        after_s: Seconds after which it is said first.
        again_s: Seconds after which it is said again and again.
    """

    def watch() -> None:
        wait_s = after_s
        while True:
            time.sleep(wait_s)
            frames = sys._current_frames()
            staying = [thread for thread in threading.enumerate() if not thread.daemon]
            others = [thread for thread in staying if thread is not threading.main_thread()] or staying
            places = [f"{thread.name} ({_place(frames.get(thread.ident or 0))})" for thread in others]
            say(
                f"runner: rank {rank} has ended its program, but its process goes on: {', '.join(places)}. A thread "
                "with daemon=True does not hold it up; Ctrl-C or SIGTERM twice ends the run"
            )
            wait_s = again_s

    threading.Thread(target=watch, name="process-end", daemon=True).start()


def _place(frame: FrameType | None) -> str:
    """Return where a thread is: its innermost frame outside of the standard library, or the innermost one."""
    frames = [f"{one.filename}:{one.lineno}" for one in traceback.extract_stack(frame)] if frame is not None else []
    own = [place for place in frames if not place.startswith((_STDLIB, "<")) or "-packages" in place]
    return (own or frames or ["unknown"])[-1]


def unfinished_training() -> str | None:
    """Return what is left of a training that a program which ends with status 0 has not ended; None if nothing is."""
    manager = sys.modules.get("checkpointing.manager.manager")
    found = manager.unfinished_training() if manager is not None else None
    if found is None:
        return None
    step, total = found
    return (
        f"SystemExit: the program ended with status 0 at step {step} of {total}, in the middle of its training: by "
        "sys.exit() or os._exit(), or as a loop was left without manager.close()"
    )
