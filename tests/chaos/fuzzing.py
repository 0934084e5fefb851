"""Feeds damaged files to a reader, in a process that they may crash."""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# Processor time, so that a busy machine does not matter; a case takes milliseconds.
_CASE_LIMIT_S = 10.0
_ADDRESS_SPACE_BYTES = 4 << 30
_MEMORY_BYTES = 512 << 20
_MAX_FAILURES = 5
_MAX_TEXT = 2000
_FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "socket.connect"}
NEVER_OPENED = "/tmp/opened-by-a-checkpoint"


@dataclass(frozen=True)
class Reader:
    """One way in which something of a checkpoint is read.

    Attributes:
        data: a real file's bytes.
        mutations: ways to damage it.
        read: reads the given bytes; returns True if they were accepted, and raises AssertionError if they should not
            have been; returns False if they were refused as documented.
    """

    data: bytes
    mutations: Sequence[Callable[[bytes, random.Random], bytes]]
    read: Callable[[bytes], bool]


class TooSlow(BaseException):
    """Not an `Exception`, so that no handler can swallow it."""


def refused(name: str, *errors: type[Exception]) -> Any:
    """`with refused("file", Error) as was:` - `was()` says whether it was; the text must be one to show to people."""
    return _Refusal(name, errors)


class _Refusal:
    def __init__(self, name: str, errors: tuple[type[Exception], ...]) -> None:
        self._name, self._errors, self._was = name, errors, False

    def __enter__(self) -> Callable[[], bool]:
        return lambda: self._was

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._was = isinstance(error, self._errors)
        if self._was:
            assert_clear(str(error), self._name)
        return self._was


def assert_clear(text: str, name: str) -> None:
    """It names the file, can be printed, and be read at a glance."""
    assert name in text, f"the text does not name {name}: {text[:300]}"
    assert len(text) < _MAX_TEXT, f"a text of {len(text)} characters: {text[:300]}"
    text.encode()


def fuzz(name: str, reader: Reader, num_cases: int, seed: int, only: int | None = None) -> dict[str, int]:
    """Run the cases; returns how many were accepted and refused.

    Raises:
        AssertionError: a reader did something else; the text says how to see it again.
    """
    case = mmap.mmap(-1, 8)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        _child(reader, range(num_cases) if only is None else [only], seed, case, sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    number = int.from_bytes(case[:8], "little")
    code = os.waitstatus_to_exitcode(status)
    again = f"FUZZ_SEED={seed} FUZZ_CASE=%d python -m pytest 'tests/chaos/test_readers.py' -k '{name}'"
    assert code == 0 and answer, f"{name}, case {number}: the process ended with {code}\n{again % number}"
    outcome = json.loads(answer)
    texts = [f"{name}, case {n}: {text}\n{again % n}" for n, text in outcome["failures"]]
    assert not texts, "\n\n".join(texts)
    return {key: outcome[key] for key in ("accepted", "refused")}


def _child(reader: Reader, cases: Sequence[int], seed: int, case: mmap.mmap, sender: int) -> NoReturn:
    code = 1
    try:
        outcome = _run(reader, cases, seed, case)
        data = json.dumps(outcome).encode()
        while data:
            data = data[os.write(sender, data) :]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(reader: Reader, cases: Sequence[int], seed: int, case: mmap.mmap) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
    ran: list[str] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FORBIDDEN or (event == "open" and arguments[0] == NEVER_OPENED):
            ran.append(f"{event}{arguments!r}")

    def too_slow(*_: object) -> None:
        raise TooSlow

    sys.addaudithook(audit)
    signal.signal(signal.SIGPROF, too_slow)
    counts, failures = {True: 0, False: 0}, []
    for number in cases:
        case[:8] = number.to_bytes(8, "little")
        r = random.Random(f"{seed}/{number}")
        data = r.choice(reader.mutations)(reader.data, r)
        most_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + _MEMORY_BYTES // 1024
        signal.setitimer(signal.ITIMER_PROF, _CASE_LIMIT_S)
        try:
            counts[reader.read(data)] += 1
            problem = ""
        except TooSlow:
            problem = f"no answer after {_CASE_LIMIT_S:.0f} s"
        except BaseException:
            problem = traceback.format_exc(chain=False)[-3000:]
        signal.setitimer(signal.ITIMER_PROF, 0)
        memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if memory_kb > most_kb:
            problem = problem or f"it took {memory_kb >> 10} MB"
        if ran:
            problem = f"code was run: {ran}"
            ran.clear()
        if problem:
            failures.append((number, f"{problem}\nof {data[:200]!r}"))
            if len(failures) == _MAX_FAILURES:
                break
    return {"accepted": counts[True], "refused": counts[False], "failures": failures}
