"""Metrics, scraped as Prometheus scrapes them, and the rules and dashboards that use them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest
from infra.parts import needs
from infra.ports import free_port
from integration.support import SHORT_JOB, TOTAL_STEPS, Run, wait_for_commit
from prometheus_client.parser import text_string_to_metric_families

# One worker of pytest-xdist runs the job that they look at.
pytestmark = pytest.mark.xdist_group("monitoring")
MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"


def scrape(port: int) -> tuple[str, dict[tuple[str, str], float]]:
    """Return the page, and its samples by name and label value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    return text, samples


def listening(run: Run) -> set[str]:
    """Return the addresses that the run's processes listen on."""
    assert run.process is not None
    processes = [psutil.Process(run.process.pid), *run.processes()]
    found = [connection for process in processes for connection in process.net_connections("inet")]
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, set[str]]:
    """The page of a run that was killed once, and its listening addresses; the run is held while it is scraped."""
    port, folder = free_port(), tmp_path_factory.mktemp("monitored")
    run = Run(folder / "run", *SHORT_JOB, "--metrics-port", str(port)).start_held(30, "training.loss=kill@25")
    run.wait_for_step(30, attempt=2)
    wait_for_commit(run, 20)
    text, figures = scrape(port)
    assert figures["runner_restarts_total", "crashed"] == 1
    assert figures["runner_state", "running"] == 1 and figures["runner_state", "finished"] == 0
    assert 30 <= figures["runner_step", ""] <= TOTAL_STEPS == figures["runner_total_steps", ""]
    assert figures["runner_checkpoint_step", "local"] >= 20 and figures["runner_checkpoint_age_seconds", "local"] >= 0
    assert 0 < figures["runner_goodput_ratio", ""] < 1 and figures["runner_loss", ""] > 0
    assert figures["runner_restarts_left", ""] in (4, 5) and figures["runner_time_seconds", "start-up"] > 0
    addresses = listening(run)
    run.end()
    return text, addresses


@pytest.fixture(scope="module")
def page(monitored: tuple[str, set[str]]) -> str:
    return monitored[0]


def test_a_run_on_one_machine_cannot_be_reached_from_another(monitored: tuple[str, set[str]]) -> None:
    """torch's two stores listened on all interfaces, and unpickle what they receive."""
    assert monitored[1] == {"127.0.0.1"}


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Run(tmp_path / "run", *SHORT_JOB, "--metrics-port", str(port)).start()
        assert run.finish() == 2 and f"--metrics-port {port} cannot be used" in run.output, run.output
    assert not run.events("attempt_started")


def test_the_page_is_what_prometheus_wants(page: str) -> None:
    assert "runner_run_info{" in page


@needs("promtool")
def test_promtool_accepts_the_page(page: str) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr.strip(), done.stdout + done.stderr


def test_rules_and_dashboard_ask_for_what_there_is(page: str) -> None:
    there = set(re.findall(r"^(runner_\w+)", page, re.MULTILINE))
    dashboard = (MONITORING / "grafana-dashboard.json").read_text()
    panels = json.loads(dashboard)["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = set(re.findall(r"\brunner_\w+", " ".join(queries) + (MONITORING / "alerts.yaml").read_text()))
    # Of a run of several nodes, or with slow ranks, alone.
    asked -= {"runner_nodes", "runner_max_nodes", "runner_slow_rank_ratio"}
    assert len(asked) > 10 and asked <= there, asked - there


RULE_TESTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'runner_state{{instance="a", job="r", state="running"}}', values: '1x90'}}
      - {{series: 'runner_state{{instance="b", job="r", state="waiting"}}', values: '0x50 1x40'}}
      - {{series: 'kube_job_failed{{namespace="n", job_name="train-node-0", condition="true"}}', values: '0x80 1x10'}}
      - {{series: 'kube_pod_status_phase{{pod="train-0-x", phase="Pending"}}', values: '0x50 1x40'}}
      - {{series: 'runner_step{{instance="g", job="gone"}}', values: '0+1x20 _x70'}}
      - {{series: 'runner_total_steps{{instance="g", job="gone"}}', values: '100x20 _x70'}}
      - {{series: 'runner_step{{instance="d", job="done"}}', values: '0+5x20 _x70'}}
      - {{series: 'runner_total_steps{{instance="d", job="done"}}', values: '100x20 _x70'}}
      - {{series: 'runner_state{{instance="n", job="new", state="running"}}', values: '_x60 1x20 _x10'}}
      - {{series: 'runner_step{{instance="n", job="new"}}', values: '_x60 0x20 _x10'}}
      - {{series: 'DCGM_FI_DEV_XID_ERRORS{{Hostname="h", gpu="3"}}', values: '0x85 79x5'}}
      - {{series: 'runner_step{{instance="a", job="r"}}', values: '0+1x20 20x70'}}
      - {{series: 'runner_checkpoint_age_seconds{{instance="a", job="r", tier="remote"}}', values: '0+60x90'}}
      - {{series: 'runner_restarts_total{{instance="a", job="r", cause="crashed"}}', values: '0+0x30 1+1x60'}}
      - {{series: 'runner_restarts_left{{instance="a", job="r"}}', values: '5x80 1x10'}}
      - {{series: 'runner_checkpoint_failures_total{{instance="a", job="r"}}', values: '0x85 1x5'}}
      - {{series: 'runner_goodput_ratio{{instance="a", job="r"}}', values: '0.97x90'}}
      - {{series: 'runner_time_seconds{{instance="a", job="r", cause="training"}}', values: '0+60x90'}}
    alert_rule_test:
      - {{eval_time: 15m, alertname: RunnerStandsStill, exp_alerts: []}}
      - {{eval_time: 15m, alertname: RunnerCheckpointTooOld, exp_alerts: []}}
      - {{eval_time: 80m, alertname: RunnerBudgetAlmostSpent, exp_alerts: []}}
      - {{eval_time: 90m, alertname: RunnerGoodputLow, exp_alerts: []}}
      - {{eval_time: 60m, alertname: RunnerWaits, exp_alerts: []}}
      - {{eval_time: 70m, alertname: RunnerJobFailed, exp_alerts: []}}
      - {{eval_time: 70m, alertname: RunnerPodPending, exp_alerts: []}}
      - {{eval_time: 45m, alertname: RunnerGone, exp_alerts: []}}
      - eval_time: 90m
        alertname: RunnerGone
        exp_alerts:
          - exp_labels: {{severity: critical, job: gone}}
            exp_annotations: {{summary: "gone: no runner for 30 minutes, and the run is at step 20"}}
      - eval_time: 75m
        alertname: RunnerStandsStill
        exp_alerts:
          - exp_labels: {{severity: critical, job: r, instance: a}}
            exp_annotations: {{summary: "a: no step in 30 minutes"}}
      - {{eval_time: 80m, alertname: RunnerGpuXid, exp_alerts: []}}
"""
FIRING = (
    *("RunnerStandsStill", "RunnerCheckpointTooOld", "RunnerKeepsRestarting", "RunnerBudgetAlmostSpent"),
    *("RunnerWaits", "RunnerJobFailed", "RunnerPodPending", "RunnerGone", "RunnerGpuXid"),
)


@needs("promtool")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    rules = MONITORING / "alerts.yaml"
    assert subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True, timeout=60).returncode == 0
    path = tmp_path / "tests.yaml"
    path.write_text(RULE_TESTS.format(rules=rules))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    # The other way round: nobody fires is wrong by then.
    for name in (*FIRING, "RunnerSavesFail"):
        silent = RULE_TESTS.format(rules=rules).split("    alert_rule_test:\n")[0] + "    alert_rule_test:\n"
        path.write_text(silent + f"      - {{eval_time: 90m, alertname: {name}, exp_alerts: []}}\n")
        done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and f'alertname="{name}"' in done.stdout + done.stderr, name
