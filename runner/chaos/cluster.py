"""The nodes of one run under test: started, observed and ended one by one, as machines are."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointing.agent.events import Committed, Log, SnapshotTaken
from checkpointing.commit.tiers import Tiers
from runner.chaos.network import Network, address_of, inside
from runner.chaos.run_under_test import POLL_S, JobUnderTest, RunUnderTest
from runner.chaos.sandbox import Clock, made_or_why_not
from runner.errors import ExitCode
from runner.journal.events import Entry
from runner.journal.journal import JOURNAL_NAME
from runner.journal.ledger import led_sessions
from runner.lease.lease import newest_lease
from runner.system import processes

PORT = 29611
# From the end of a run to the exit of its last node, which may have to read that the run has finished.
_FINISH_S = 120.0


class ClusterNode:
    """One node: its rank, its runner and journal, and its wall clock, or why it has none of its own."""

    def __init__(self, rank: int, folder: Path, job: JobUnderTest, network: Network | None) -> None:
        """Prepare; nothing is started. `folder` is its disk; the job is equal on all nodes."""
        self.rank, self._folder = rank, folder
        address = address_of(rank) if network is not None else f"127.0.0.{rank + 1}"
        first = address_of(0) if network is not None else "127.0.0.1"
        own = ["--node-rank", str(rank), "--rdzv-endpoint", f"{first}:{PORT}", "--local-addr", address]
        own += ["--set", f"launch.peer_bind={address}"]
        command = job.command(folder, *own)
        self._command = inside(rank, command) if network is not None else command
        self.clock = made_or_why_not(lambda: Clock(folder.with_name(f"{folder.name}-clock")))
        device = "eth0" if network is not None else "lo"
        own_network = {"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": device}
        self._environment = {**job.environment(folder), **own_network, "OMP_NUM_THREADS": "1"}
        if isinstance(self.clock, Clock):
            self._environment |= self.clock.environment
        self._outputs = folder.with_name(f"{folder.name}-output")
        self.run = self._make_run()
        self._started = self._lost_power = False

    def _make_run(self) -> RunUnderTest:
        records = self._folder / f"node-{self.rank}" if self.rank else self._folder
        self._outputs.mkdir(parents=True, exist_ok=True)
        return RunUnderTest(
            self._command, self._outputs, self._environment, journal=records / JOURNAL_NAME, alone=False
        )

    @property
    def is_alive(self) -> bool:
        """Whether its runner runs."""
        return self._started and self.run.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of its runner; None while it runs, and before the first start."""
        if self._lost_power:
            return -signal.SIGKILL
        return self.run.process.poll() if self._started else None

    def start(self) -> None:
        """Start its runner."""
        self._started, self._lost_power = True, False
        self.run.start()

    def kill(self) -> None:
        """End all its processes at once, as a power cut does."""
        if self._started:
            # psutil may reap the runner, and Popen takes the status that it does not get for 0.
            self._lost_power = self._lost_power or self.is_alive
            processes.kill_all(self.run.marked)
            self.run.process.wait()

    def replace(self) -> None:
        """Give it an empty disk; its runner must not run."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.run.close()
        self.run = self._make_run()
        self._started = self._lost_power = False

    def entries(self) -> list[Entry]:
        """Return the entries of the sessions in which it led."""
        self.run.refresh()
        return led_sessions(self.run.entries)

    def close(self) -> None:
        """Kill what is left of it."""
        self.kill()
        self.run.close()


class Cluster:
    """All nodes of one run, by rank; a context that kills what is left at its end."""

    def __init__(
        self,
        folder: Path,
        job: JobUnderTest,
        tiers: Tiers,
        num_nodes: int,
        network: Network | None,
        *,
        fewest: int = 1,
    ) -> None:
        """Prepare; nothing is started. `folder` holds the disks of all nodes, and `fewest` are enough to train.

        Without a network, the nodes are processes of this machine.
        """
        self.network, self.tiers = network, tiers
        job = job.with_options("--nnodes", f"{fewest}:{num_nodes}", "--nproc-per-node", "1")
        self.nodes = [ClusterNode(rank, folder / f"machine-{rank}", job, network) for rank in range(num_nodes)]
        self._past: list[Entry] = []

    def __enter__(self) -> Cluster:
        self.start(self.nodes)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()

    def start(self, nodes: Sequence[ClusterNode]) -> None:
        """Start the runners of these nodes."""
        for node in nodes:
            node.start()

    def replace(self, node: ClusterNode) -> None:
        """Start a new machine under the node rank of one that is gone; what it recorded is remembered."""
        self._past += node.entries()
        node.replace()
        node.start()

    @property
    def alive(self) -> list[ClusterNode]:
        """The nodes whose runner runs."""
        return [node for node in self.nodes if node.is_alive]

    @property
    def absent(self) -> list[ClusterNode]:
        """The nodes whose runner does not run."""
        return [node for node in self.nodes if not node.is_alive]

    @property
    def leader(self) -> ClusterNode | None:
        """The node that has the newest lease, if it runs."""
        with contextlib.suppress(OSError):
            lease = newest_lease(self.tiers.durable.sidecars)
            return next((node for node in self.alive if lease is not None and node.rank == lease.node_rank), None)
        return None

    def entries(self) -> list[Entry]:
        """Return what the leaders have recorded, in the order of time."""
        own = [entry for node in self.nodes for entry in node.entries()]
        return sorted([*self._past, *own], key=lambda entry: entry.time)

    def step(self) -> int:
        """Return the newest step that was logged or captured."""
        return max((step for entry in self.entries() if (step := _step_of(entry)) is not None), default=0)

    def acknowledged(self) -> int:
        """Return the newest step that a leader recorded as committed; -1 if there is none."""
        return max((entry.event.step for entry in self.entries() if isinstance(entry.event, Committed)), default=-1)

    @property
    def has_finished(self) -> bool:
        """Whether some node has ended well."""
        return any(node.exit_code == ExitCode.DONE for node in self.nodes)

    def wait_for_step(self, limit_s: float) -> bool:
        """Wait for a step to be logged or captured, or for the end of the run.

        Nodes are started again where all have ended, as schedulers do. Times of entries say nothing, as clocks jump.
        """
        before = self._num_steps()
        return self._wait(lambda: self.has_finished or self._num_steps() > before, limit_s)

    def finish(self, limit_s: float) -> bool:
        """Wait for the end of the run, and of all its runners; return whether all ended well in time."""
        if not self._wait(lambda: self.has_finished, limit_s):
            return False
        deadline = time.monotonic() + _FINISH_S
        while self.alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return not self.alive

    def stop(self, nodes: Sequence[ClusterNode], limit_s: float) -> list[int | None]:
        """Send SIGTERM to nodes at the same time; return their exit codes, None for one that did not exit in time."""
        for node in nodes:
            node.run.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + limit_s
        codes: list[int | None] = []
        for node in nodes:
            try:
                codes.append(node.run.process.wait(max(deadline - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes

    def unexpected_ends(self) -> list[str]:
        """Return the nodes that ended by themselves with anything but 0 or 75, in words."""
        expected = (None, ExitCode.DONE, ExitCode.PREEMPTED, -signal.SIGKILL)
        return [
            f"node {node.rank} ended with {node.exit_code}: {node.run.tail(400)}"
            for node in self.nodes
            if node.exit_code not in expected
        ]

    def _num_steps(self) -> int:
        return sum(_step_of(entry) is not None for entry in self.entries())

    def _wait(self, done: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline or self.unexpected_ends():
                return False
            if not self.alive:
                self.start(self.nodes)
            time.sleep(0.1)
        return True


def _step_of(entry: Entry) -> int | None:
    """Return the step that an entry shows to be made; a loop of the user's own need not log any."""
    match entry.event:
        case Log() as log:
            return log.step_of_run
        case SnapshotTaken() as taken:
            return taken.step
    return None
