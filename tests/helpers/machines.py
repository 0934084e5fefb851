"""Machines: network namespaces, wires between them, a volume that all see; nothing else shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration.support import TOTAL_STEPS, Run, troubled, wait_until

from runner.chaos.network import address_of, inside

PORT = 29611
# Steps of `troubled`.
END = 40


class Machine(Run):
    """One of several machines, one rank each."""

    def __init__(self, folder: Path, number: int, *options: str, script: list[str], nnodes: str = "2") -> None:
        shared = folder / "volume"
        super().__init__(
            folder / f"machine-{number}",
            *("--set", f"checkpoint.location={shared}", "--nnodes", nnodes, "--node-rank", str(number)),
            *("--nproc-per-node", "1", "--rdzv-endpoint", f"{address_of(0)}:{PORT}"),
            *("--local-addr", address_of(number)),
            *options,
            script=script,
        )
        self.shared = shared
        self.number = number
        own = "" if number == 0 else f"node-{number}"
        self.records = self.folder / own
        self.command = inside(number, self.command)

    def start(self, **environment: str) -> Run:
        return super().start(GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", **environment)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        folder, self.folder = self.folder, self.records
        try:
            return super().events(name)
        finally:
            self.folder = folder

    def checkpoint(self, step: int) -> Path:
        return self.shared / f"checkpoint-{step}"

    def runner_pid(self) -> int:
        """`ip netns exec` has become the runner."""
        assert self.process is not None
        return self.process.pid


def pair(folder: Path, *options: str, trouble: str = "", crawl: int = TOTAL_STEPS) -> list[Machine]:
    """Both run one script: see `troubled`."""
    script = troubled(folder, trouble, crawl=crawl)
    return [Machine(folder, number, *options, script=script) for number in (0, 1)]


def start(machines: list[Machine]) -> None:
    for machine in machines:
        machine.start()


def finish(machines: list[Machine], timeout_s: float = 500) -> list[int]:
    return [machine.finish(timeout_s) for machine in machines]


def outputs(machines: list[Machine]) -> str:
    return "\n----\n".join(machine.output for machine in machines)


def wait_for_commit(machines: list[Machine], step: int) -> None:
    wait_until(machines[0], lambda: any(event["step"] >= step for event in machines[0].events("committed")))


def kinds(machine: Machine) -> list[object]:
    return [event["kind"] for event in machine.events("attempt_ended")]


def assert_nobody_is_left(machines: list[Machine]) -> None:
    assert not [stray for machine in machines for stray in machine.leftovers()]
