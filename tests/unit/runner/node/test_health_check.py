"""When the GPUs of a node are checked, and what each end of the check means."""

from __future__ import annotations

import contextlib
import json
from typing import IO, Any

import pytest
from helpers.node_fakes import FakeHost, FakeLoop

from runner.errors import ExitCode, GpuFaulty
from runner.node.health_check import HealthCheck
from runner.system.event_loop import StopRequest


class Check:
    """A check that ends after some turns of the loop.

    Attributes:
        killed: Whether it had to be killed.
    """

    def __init__(self, turns: int, status: int, output: str, errors: str) -> None:
        self._turns, self._status, self._texts = turns, status, (output, errors)
        self.starts, self.killed = 0, False

    def start(self, output: IO[bytes], errors: IO[bytes]) -> Any:
        self.starts += 1
        for file, text in zip((output, errors), self._texts, strict=True):
            file.write(text.encode())
        return self

    def poll(self) -> int | None:
        self._turns -= 1
        return self._status if self._turns < 0 else None

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return -9


class Bench:
    def __init__(self, *, turns: int = 3, status: int = 0, output: str = "[]", errors: str = "") -> None:
        self.host, self.stop = FakeHost(), StopRequest()
        self.loop = FakeLoop(self.host)
        loop: Any = self.loop
        self.check = Check(turns, status, output, errors)
        self.faults: list[str] = []
        self.health = HealthCheck(self.faults.append, loop=loop, stop=self.stop, host=self.host, start=self.check.start)


def test_it_is_done_once() -> None:
    bench = Bench()
    bench.health.run()
    bench.health.run()
    assert bench.check.starts == 1 and bench.faults == [] and not bench.check.killed


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"output": '["GPU 1 failed: ECC", "GPU 2 computes wrong products"]'}, "GPU 1 failed: ECC; GPU 2 computes"),
        ({"status": -6, "output": "", "errors": "x\nterminate called\n"}, "status -6: terminate called"),
        ({"status": 1, "output": "", "errors": ""}, "status 1: it said nothing"),
        ({"output": "no JSON"}, "the check ended with status 0"),
        ({"turns": 100_000}, "the check did not end"),
    ],
)
def test_a_fault_is_reported_before_it_is_raised(options: dict[str, Any], fault: str) -> None:
    bench = Bench(**options)
    with pytest.raises(GpuFaulty, match=fault) as caught:
        bench.health.run()
    assert caught.value.exit_code is ExitCode.BAD_NODE and len(bench.faults) == 1
    assert bench.check.killed == ("turns" in options)


@pytest.mark.parametrize(
    ("status", "errors"), [(-9, ""), (1, "Traceback\nImportError: libtorch.so: cannot read"), (1, "MemoryError")]
)
def test_a_check_that_fails_for_another_reason_is_no_verdict(status: int, errors: str) -> None:
    """The machine would be left out for a day."""
    bench = Bench(status=status, output="", errors=errors)
    bench.health.run()
    assert bench.faults == []


@pytest.mark.parametrize(("fault", "starts"), [("GPU 0 failed: no resources", 2), ("GPU 0 computes wrong products", 1)])
def test_what_fails_only_once_is_no_verdict_but_a_wrong_result_is(fault: str, starts: int) -> None:
    bench = Bench(output=json.dumps([fault]))
    start = bench.check.start

    def second(output: IO[bytes], errors: IO[bytes]) -> Any:
        if bench.check.starts == 1:
            bench.check._texts = "[]", ""
        return start(output, errors)

    bench.health._start = second
    with contextlib.suppress(GpuFaulty):
        bench.health.run()
    assert bench.check.starts == starts and bench.faults == ([] if starts == 2 else [fault])


def test_a_stop_request_ends_it_without_a_verdict() -> None:
    bench = Bench(turns=100_000, output='["GPU 0 failed"]')
    bench.loop.plan = [lambda: None, lambda: bench.stop.ask("SIGTERM")]
    bench.health.run()
    assert bench.check.killed and bench.faults == []
