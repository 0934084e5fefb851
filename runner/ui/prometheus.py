"""Prometheus metrics of a run, computed from its journal for each scrape."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from runner.errors import UsageError
from runner.journal.journal import read_journal
from runner.journal.ledger import restarts_by_kind
from runner.journal.summary import RunState, RunSummary, summarise
from runner.ui.web_server import web_server

# Seconds for which a summary is served again: this multiple of the time that it took, within these bounds. A journal
# of weeks takes long to summarise.
_CACHE_S, _LONGEST_CACHE_S = 2.0, 60.0
_CACHE_SHARE = 50


class RunCollector(Collector):
    """Yields the metrics of one run; the journal is read again once the cached summary is out of date."""

    def __init__(self, journal: Path, clock: Callable[[], float] = time.time) -> None:
        self._journal, self._clock = journal, clock
        self._fresh_until, self._run = 0.0, RunSummary()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the Prometheus client for each scrape."""
        if time.monotonic() >= self._fresh_until:
            began = time.thread_time()
            self._run = summarise(read_journal(self._journal), now=self._clock())
            took_s = time.thread_time() - began
            cache_s = min(max(_CACHE_S, _CACHE_SHARE * took_s), _LONGEST_CACHE_S)
            self._fresh_until = time.monotonic() + cache_s
        yield from metrics(self._run, self._clock())


def metrics(run: RunSummary, now: float) -> Iterator[Metric]:
    """Yield the metrics of a run; what its journal does not know yet is left out.

    The reference page lists them with these help texts. `now` is in seconds since the epoch, by the journal's clock.
    """
    yield InfoMetricFamily("runner_run", "Identity of the run.", {"run_id": run.run_id})
    states = {state.value: float(state is run.state) for state in RunState}
    yield _by("runner_state", "State of the run: 1 for the current state, 0 for the others.", "state", states)
    for name, text, value in (
        ("runner_step", "Finished optimizer steps.", run.step),
        ("runner_total_steps", "Optimizer steps of the complete run.", run.total_steps),
        ("runner_loss", "Training loss of the newest log entry.", run.last_loss),
        ("runner_tokens_per_second", "Tokens per second of all ranks, from the newest log entry.", run.tokens_per_s),
        ("runner_goodput_ratio", "Share of the node-seconds spent in steps that count, from 0 to 1.", run.goodput),
        ("runner_nodes", "Nodes of the newest attempt.", len(run.nodes) if run.max_nodes else None),
        ("runner_max_nodes", "Nodes that the run may have.", run.max_nodes or None),
        ("runner_restarts_left", "Failures left in the restart budget.", run.restarts_left),
    ):
        if isinstance(value, (int, float)):
            yield GaugeMetricFamily(name, text, value)
    yield _by("runner_checkpoint_step", "Step of the newest committed checkpoint.", "tier", dict(run.newest_by_tier))
    yield _slow_ranks(run)
    ages = {tier: max(now - at, 0.0) for tier, at in run.newest_at_by_tier.items()}
    yield _by("runner_checkpoint_age_seconds", "Seconds since the newest commit.", "tier", ages)
    yield _by("runner_time_seconds", "Wall time of the run in seconds, by cause.", "cause", run.time_by_cause)
    restarts = CounterMetricFamily("runner_restarts", "Failed attempts, by failure class.", labels=["cause"])
    for kind, count in restarts_by_kind(run.attempts).items():
        restarts.add_metric([kind], count)
    yield restarts
    pause_s = sum(change.pause_s for change in run.node_changes)
    stall_s = sum(attempt.stall_s for attempt in run.attempts)
    for name, text, value in (
        ("runner_lost_steps", "Steps that were recomputed after a failure.", run.lost_steps),
        ("runner_node_changes", "Attempts on other nodes than the attempt before.", len(run.node_changes)),
        ("runner_node_change_seconds", "Seconds without steps around these changes.", pause_s),
        ("runner_checkpoint_stall_seconds", "Seconds that training waited for snapshots.", stall_s),
        ("runner_checkpoint_failures", "Failed saves.", run.failed_commits),
        ("runner_snapshots_skipped", "Snapshots skipped because their memory was in use.", run.skipped_snapshots),
    ):
        yield CounterMetricFamily(name, text, value)


def serve(address: str, port: int, collector: RunCollector) -> None:
    """Serve http://ADDRESS:PORT/metrics in a thread until the process ends; UsageError if the port cannot be used."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server = web_server(address, port, make_wsgi_app(registry))
    except OSError as error:
        raise UsageError(
            f"--metrics-port {port} cannot be used: {error.strerror}; choose another port, or omit the option"
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


def _slow_ranks(run: RunSummary) -> GaugeMetricFamily:
    text = "Time that a slow rank needs by itself in a step, as a multiple of the median rank's."
    family = GaugeMetricFamily("runner_slow_rank_ratio", text, labels=["rank", "node"])
    if run.slow is not None and run.state is RunState.RUNNING:
        for rank, node, ratio in zip(run.slow.ranks, run.slow.nodes, run.slow.ratios, strict=True):
            family.add_metric([str(rank), str(node)], ratio)
    return family


def _by(name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
