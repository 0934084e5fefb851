"""A run's figures for Prometheus: told from its journal, whenever somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from runner.errors import UsageError
from runner.journal.journal import read_journal
from runner.journal.ledger import restarts_by_kind
from runner.journal.summary import RunState, RunSummary, summarise

# Whoever asks more often is told the same again; the more so as a journal of weeks takes its time to sum up.
_CACHE_S, _LONGEST_CACHE_S = 2.0, 60.0
_CACHE_SHARE = 50


class RunCollector(Collector):
    """Reads the journal anew for each scrape. `clock` is the journal's."""

    def __init__(self, journal: Path, clock: Callable[[], float] = time.time) -> None:
        self._journal, self._clock = journal, clock
        self._fresh_until, self._run = 0.0, RunSummary()

    def collect(self) -> Iterator[Any]:
        if time.monotonic() >= self._fresh_until:
            began = time.thread_time()
            self._run = summarise(read_journal(self._journal), now=self._clock())
            took_s = time.thread_time() - began
            cache_s = min(max(_CACHE_S, _CACHE_SHARE * took_s), _LONGEST_CACHE_S)
            self._fresh_until = time.monotonic() + cache_s
        run, now = self._run, self._clock()
        yield InfoMetricFamily("runner_run", "Which run this is.", {"run_id": run.run_id})
        yield _by("runner_state", "1 for the state that the run is in.", "state", _states(run))
        for name, text, value in (
            ("runner_step", "Optimizer steps finished.", run.step),
            ("runner_total_steps", "Optimizer steps to be made.", run.total_steps),
            ("runner_loss", "Training loss, by the last log entry.", run.last_loss),
            ("runner_tokens_per_second", "Of all ranks, by the last log entry.", run.tokens_per_s),
            ("runner_goodput_ratio", "Share of the wall time that went into steps that count.", run.goodput),
            ("runner_restarts_left", "Failures that the budget has room for.", run.restarts_left),
        ):
            if isinstance(value, (int, float)):
                yield GaugeMetricFamily(name, text, value)
        yield _by("runner_checkpoint_step", "Newest committed step.", "tier", dict(run.newest_by_tier))
        ages = {tier: max(now - at, 0.0) for tier, at in run.newest_at_by_tier.items()}
        yield _by("runner_checkpoint_age_seconds", "Since the newest commit.", "tier", ages)
        yield _by("runner_time_seconds", "Of the run's wall time, by what it went into.", "cause", run.time_by_cause)
        restarts = CounterMetricFamily("runner_restarts", "Attempts that failed, by how.", labels=["cause"])
        for kind, count in restarts_by_kind(run.attempts).items():
            restarts.add_metric([kind], count)
        yield restarts
        stall_s = sum(attempt.stall_s for attempt in run.attempts)
        for name, text, value in (
            ("runner_lost_steps", "Steps that had to be computed again.", run.lost_steps),
            ("runner_checkpoint_stall_seconds", "For which training has waited for snapshots.", stall_s),
            ("runner_checkpoint_failures", "Saves that storage has refused.", run.failed_commits),
            ("runner_snapshots_skipped", "Snapshots left out as all memory for them was busy.", run.skipped_snapshots),
        ):
            yield CounterMetricFamily(name, text, value)


def serve(address: str, port: int, collector: RunCollector) -> None:
    """Answer at http://ADDRESS:PORT/metrics from now on, in a thread, until the process ends.

    Raises:
        UsageError: the port cannot be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        start_http_server(port, address, registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-port {port} cannot be used: {error.strerror}; choose another, or leave it out"
        ) from None


def _states(run: RunSummary) -> dict[str, float]:
    return {state.value: float(state is run.state) for state in RunState}


def _by(name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
