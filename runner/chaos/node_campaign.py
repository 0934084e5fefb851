"""A campaign over several nodes: the same job on machines that come and go, must end like the fault-free run.

The fault-free run has as many ranks on this machine. Where the number of nodes never changed, the results must be
bit-identical to it. Where it did, sums were added in another order: then steps, samples and learning rates must be the
same, and losses close.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.chaos import invariants
from runner.chaos.campaign import SETTINGS, Campaign
from runner.chaos.cluster import Cluster
from runner.chaos.network import Network, NoNetwork
from runner.chaos.node_faults import NODE_FAULTS, FaultViolation, NodeFault
from runner.chaos.run_under_test import JobUnderTest
from runner.chaos.scene import JobPace, Locations, NotApplicable
from runner.chaos.verdict import HALVED_TOLERANCE, Injection, Result
from runner.config.schema import Config
from runner.journal.events import AttemptStarted, Entry
from runner.journal.summary import summarise
from runner.system import processes

# From a fault to the next step: a lost leader is replaced after 6 s, a cut is noticed after 4 s, and all of a run's
# processes may have to start on a machine that is busy.
RECOVERY_LIMIT_S = 120.0
# While its storage is read-only, a node's saves fail one after the other.
_QUICK = ("launch.grow_interval_s=0", "launch.last_call_s=2", "checkpoint.max_failed_saves=null")
# Between two faults: seconds, at most.
_PAUSE_S = 3.0
# Faults come alone or in bursts: what fails while a run recovers is where such systems break.
_BURSTS = (1, 1, 2, 3)
_FINISH_LIMIT_S = 600.0


class NodeCampaign:
    """A job, its fault-free run, and the nodes that it should survive the loss of."""

    def __init__(
        self,
        folder: Path,
        job: JobUnderTest,
        *,
        locations: Locations,
        num_nodes: int,
        seed: int,
        faults: Sequence[NodeFault] = NODE_FAULTS,
        tolerance: float | None = None,
        exact: bool = False,
        fewest: int = 1,
        report: Callable[[str], None] = print,
    ) -> None:
        """Prepare a campaign of nodes with one rank each, which all see the locations; otherwise see `Campaign`.

        Losses may differ by the tolerance, a share (None for 2 %), where the number of nodes changed. With `exact`,
        virtual ranks compute the steps: all runs must end in the same bits. So they must if `fewest`, the smallest
        number of nodes that train, is all of them: then no run changes its size.
        """
        self._folder, self._locations, self._num_nodes, self._fewest = folder, locations, num_nodes, fewest
        self._job = job.with_settings(*SETTINGS, *_QUICK)
        self._random, self._faults = random.Random(seed), list(faults)
        self._tolerance = HALVED_TOLERANCE if tolerance is None else tolerance
        self._exact = exact
        as_many_ranks = job.with_options("--nproc-per-node", str(num_nodes))
        # Next to the fault-free run there is a network, which must outlive it.
        self._calm = Campaign(folder, as_many_ranks, locations=locations, seed=seed, alone=False, report=report)
        self.result = self._calm.result
        self.result.close_means = f"on a changing number of nodes and with losses within {self._tolerance:.2g}"

    def run(self, num_faults: int, *, seconds: float | None = None, keep: bool = False) -> Result:
        """Inject faults; see `Campaign.run`."""
        processes.become_subreaper()
        began, result = time.monotonic(), self.result
        pace = self._calm.run_reference()
        is_enough = functools.partial(self._calm.is_enough, num_faults, seconds)
        with contextlib.ExitStack() as stack:
            network = self._network(stack)
            while not is_enough():
                folder = self._folder / f"run-{result.runs + 1}"
                if self._run_round(folder, network, pace, is_enough) and not keep:
                    self._locations.remove(folder)
        result.total_s = time.monotonic() - began
        return result

    def _network(self, stack: contextlib.ExitStack) -> Network | None:
        try:
            return stack.enter_context(Network(self._num_nodes))
        except NoNetwork as error:
            self._calm.report(f"the nodes are processes of this machine, and no wire can be cut: {error}")
            return None

    def _run_round(self, folder: Path, network: Network | None, pace: JobPace, is_enough: Callable[[], bool]) -> bool:
        """Run the job on nodes that come and go; return whether it passed."""
        result, number = self.result, self.result.runs + 1
        result.runs, before = number, len(self.result.all_violations)
        job = self._job.with_options(*self._locations.settings(folder))
        finished = False
        tiers, number_of_nodes = self._locations.tiers(folder), self._num_nodes
        with Cluster(folder, job, tiers, number_of_nodes, network, fewest=self._fewest) as cluster:
            begun = cluster.wait_for_step(2 * RECOVERY_LIMIT_S)
            while begun and not is_enough() and not cluster.has_finished:
                time.sleep(self._random.uniform(0, _PAUSE_S))
                if not self._inject(cluster, number):
                    break
            else:
                finished = begun and cluster.finish(_FINISH_LIMIT_S)
            entries = cluster.entries()
            result.violations += [f"run {number}: {text}" for text in self._check(cluster, entries, finished=finished)]
        differences = self._compare(folder, entries) if finished else ["the run did not finish"]
        return self._calm.judge(number, before, differences)

    def _inject(self, cluster: Cluster, number: int) -> bool:
        """Inject a burst of faults, and check what follows; return whether the run may go on."""
        if not cluster.alive:
            # All have ended with a code that asks for another start.
            return cluster.wait_for_step(RECOVERY_LIMIT_S)
        burst = self._burst(cluster, number)
        if not burst:
            return True
        injection, at = burst[-1]
        moved_on = cluster.wait_for_step(RECOVERY_LIMIT_S)
        injection.recovered_s = round(time.monotonic() - at, 2) if moved_on else None
        if not moved_on:
            ends = "; ".join(cluster.unexpected_ends())
            injection.violations.append(ends or f"no step within {RECOVERY_LIMIT_S:.0f} s")
        injection.violations += invariants.newest_is_intact(cluster.tiers, set())
        injection.violations += invariants.acknowledged_is_there(
            cluster.acknowledged(), cluster.tiers.catalog.committed_steps()
        )
        for text in injection.violations:
            self._calm.report(f"  VIOLATION: {text}")
        return moved_on

    def _burst(self, cluster: Cluster, number: int) -> list[tuple[Injection, float]]:
        """Inject faults, the next one before the run has recovered; return each with its time (monotonic clock)."""
        burst = list[tuple[Injection, float]]()
        for place in range(self._random.choice(_BURSTS)):
            if place:
                time.sleep(self._random.uniform(0, _PAUSE_S))
            at = time.monotonic()
            injection = self._inject_one(cluster, number)
            if injection is not None:
                burst.append((injection, at))
        return burst

    def _inject_one(self, cluster: Cluster, number: int) -> Injection | None:
        fault = self._random.choice(self._faults)
        if not cluster.alive or cluster.has_finished:
            return None
        injection = Injection(fault.name, "", number, cluster.step(), "")
        try:
            injection.what = fault.inject(cluster, self._random)
        except NotApplicable as reason:
            self.result.skip(fault.name, str(reason))
            return None
        except FaultViolation as error:
            injection.violations.append(str(error))
        self.result.injections.append(injection)
        self._calm.report(f"run {number}, step {injection.step}: {fault.name}: {injection.what}")
        return injection

    def _check(self, cluster: Cluster, entries: Sequence[Entry], *, finished: bool) -> list[str]:
        by_node = {node.rank: node.entries() for node in cluster.nodes}
        self.result.lost_steps += summarise(entries).lost_steps
        return [
            *([] if finished else [f"the run did not finish; {'; '.join(cluster.unexpected_ends())}"]),
            *invariants.one_writer(by_node),
            *(f"process {process.pid} is left" for node in cluster.nodes if finished for process in node.run.marked()),
        ]

    def _compare(self, folder: Path, entries: Sequence[Entry]) -> list[str]:
        if self._exact:
            found = self._calm.differences(folder, "--any-ranks")
            self.result.identical += not found
            return found
        sizes = {entry.event.nnodes for entry in entries if isinstance(entry.event, AttemptStarted)}
        differences = self._calm.compare(folder) if sizes == {self._num_nodes} else None
        if differences == []:
            self.result.identical += 1
        if differences is None:
            differences = self._calm.differences(folder, losses=self._tolerance)
            self.result.close += not differences
        return differences


def without_dropout(config: Config) -> Config:
    """Return a job without dropout: each rank draws masks of its own, so results would depend on their number."""
    changed = config.model_copy(deep=True)
    for name, value in config.model.config.items():
        if "drop" in name and isinstance(value, float):
            changed.model.config[name] = 0.0
    changed.method.dropout = 0.0
    return changed
