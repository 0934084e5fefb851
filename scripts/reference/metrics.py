"""The Prometheus metrics, from what the exporter yields for a run of which everything is known."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, Metric

from runner.journal.ledger import CAUSES
from runner.journal.summary import RunSummary
from runner.ui.prometheus import metrics
from scripts.reference.markdown import page, table, wrap

_KNOWN = RunSummary(
    run_id="run",
    total_steps=1,
    last_loss=1.0,
    tokens_per_s=1.0,
    restarts_left=1,
    nodes=[0],
    max_nodes=1,
    newest_by_tier={"local": 1, "remote": 1},
    newest_at_by_tier={"local": 0.0, "remote": 0.0},
    time_by_cause=dict.fromkeys(CAUSES, 0.0),
)


def render() -> str:
    families = list(metrics(_KNOWN, now=0.0))
    return page(
        "Metrics",
        "runner/ui/prometheus.py",
        [
            wrap(
                "`runner start --metrics-port PORT` (`monitoring.port`) serves these metrics at `/metrics` on the "
                "node that leads. They are computed from the journal of the run. A metric without a known value is "
                "absent."
            ),
            table(
                ["metric", "type", "labels", "meaning"],
                ([f"`{_name(one)}`", one.type, ", ".join(_labels(one)), one.documentation] for one in families),
            ),
            "## Label values",
            *(
                _values(one)
                for one in families
                if one.name in ("runner_state", "runner_checkpoint_step", "runner_time_seconds")
            ),
            wrap("`cause` of `runner_restarts_total`: the failure class of the attempt."),
        ],
    )


def _name(family: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return family.name + suffix


def _labels(family: Metric) -> list[str]:
    names = list(family.samples[0].labels) if family.samples else []
    # A counter without samples keeps the names of its labels to itself.
    if not names and isinstance(family, CounterMetricFamily):
        names = list(family._labelnames)
    return [f"`{name}`" for name in names]


def _values(family: Metric) -> str:
    (name,) = family.samples[0].labels
    values = ", ".join(f"`{sample.labels[name]}`" for sample in family.samples)
    return wrap(f"`{name}` of `{_name(family)}`: {values}.")
