"""Every overlay starts the real runner under a kubelet, loses a pod to an eviction, resumes, and ends with 0.

What restarts a pod after which code is decided by the controllers of `unit.deploy`, from the same manifests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from infra.kubelet import Kubelet, Pod, wait_for
from infra.operators import pods_of
from infra.parts import needs
from unit.deploy.controllers import RENDERED, Controller, End, KubernetesJobs, PyTorchJob

from runner.chaos.network import Network
from runner.config.schema import DEFAULT_CONFIG

pytestmark = [needs("network namespaces"), needs("process namespaces")]

STEPS, SAVE_STEPS = 200, 20
# What a user sets for a first run on processors: short, small batches, threads for none.
ALSO = [
    *("--set", f"trainer.max_steps={STEPS}", "--set", f"trainer.save_steps={SAVE_STEPS}"),
    *("--set", "trainer.per_device_train_batch_size=2", "--set", "launch.last_call_s=300"),
]
OVERLAYS: dict[str, tuple[Any, int, int]] = {
    "one-node": (KubernetesJobs, 1, 1),
    "one-node-spot": (KubernetesJobs, 1, 3),
    "nodes": (KubernetesJobs, 2, 1),
    "pytorchjob": (PyTorchJob, 1, 8),
    "pytorchjob-nodes": (PyTorchJob, 2, 1),
    "several-nodes": (KubernetesJobs, 2, 2),
    "several-nodes-efa": (KubernetesJobs, 2, 1),
    "spot-workers": (KubernetesJobs, 4, 1),
    "trainjob": (KubernetesJobs, 2, 1),
}
# What makes these differ from another one is not a part of a process's life.
CONTAINED = ("one-node-spot", "nodes", "several-nodes", "pytorchjob-nodes")


class Cluster:
    """The pods of one manifest, on this machine."""

    def __init__(self, folder: Path, overlay: str, ranks: int) -> None:
        self.pods = pods_of(RENDERED / f"{overlay}.yaml")
        for pod in self.pods:
            pod.container["args"] += [*ALSO, f"--nproc-per-node={ranks}"]
            # A rank that is alone on its node takes all its processors, which here are those of other tests.
            pod.environment.append({"name": "OMP_NUM_THREADS", "value": "1"})
        self.kubelet = Kubelet(folder, self.pods, DEFAULT_CONFIG.read_text())

    def events(self, name: str) -> list[dict[str, Any]]:
        """The journal of the first node, in the volume that outlives its pods."""
        journal = self._data() / "train" / "journal.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def _data(self) -> Path:
        (data,) = [one for one in self.pods[0].spec["volumes"] if one["name"] == "data"]
        return self.kubelet.claim(data["persistentVolumeClaim"]["claimName"])

    def committed(self) -> list[int]:
        return [event["step"] for event in self.events("committed")]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    overlay, ranks = request.param
    nodes = OVERLAYS[overlay][1]
    with Network(nodes):
        made = Cluster(tmp_path, overlay, ranks)
        try:
            yield made
        finally:
            made.kubelet.end()


def run_to_the_end(cluster: Cluster, controller: Controller) -> str | None:
    """Do what the controller says at each end of a pod, without its delays; returns its verdict."""
    pods, kubelet = cluster.pods, cluster.kubelet
    while True:
        ended = [pod for pod in pods if pod.name in kubelet.running and kubelet.running[pod.name].poll() is not None]
        for pod in ended:
            verdict = controller.ended(End(pod.node, kubelet.wait(pod), time=time.time()))
            for start in verdict.starts:
                kubelet.start(pods[start.node])
            if verdict.outcome:
                return verdict.outcome
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("cluster", "evicted"),
    [
        pytest.param((overlay, ranks), nodes - 1, id=overlay, marks=[pytest.mark.soak] if overlay in CONTAINED else [])
        for overlay, (_, nodes, ranks) in OVERLAYS.items()
    ],
    indirect=["cluster"],
)
def test_an_overlay_starts_is_evicted_and_ends(cluster: Cluster, evicted: int, request: pytest.FixtureRequest) -> None:
    overlay = request.node.callspec.id
    kind, nodes, ranks = OVERLAYS[overlay]
    controller: Controller = kind(nodes, overlay)
    kubelet, pods = cluster.kubelet, cluster.pods
    for pod in pods:
        kubelet.start(pod)
    wait_for(lambda: cluster.committed(), kubelet, pods)
    victim: Pod = pods[evicted]
    code = kubelet.delete(victim)
    # Checkpointed; kubeflow-start adds 128, so that its operator starts the pod again.
    assert code in (75, 75 + 128), kubelet.output(victim)
    verdict = controller.ended(End(victim.node, code, disrupted=True, time=time.time()))
    assert [start.node for start in verdict.starts] == [victim.node]
    kubelet.start(victim)
    outcome = run_to_the_end(cluster, controller)
    said = "\n====\n".join(kubelet.output(pod) for pod in pods)
    assert outcome == "done", said
    assert cluster.committed()[-1] == STEPS, said
    resumed = cluster.events("attempt_started")
    assert len(resumed) >= 2 and resumed[0]["nnodes"] == nodes
    (one,) = {event["world_size"] for event in cluster.events("training_began") if "world_size" in event} or {0}
    assert one in (0, nodes * ranks)


def test_a_pod_with_a_field_that_nothing_has_tried_is_refused(tmp_path: Path) -> None:
    (pod,) = pods_of(RENDERED / "one-node.yaml")
    pod.spec["hostPID"] = True
    with pytest.raises(AssertionError, match="does not know hostPID"):
        Kubelet(tmp_path, [pod], "").start(pod)


def test_the_configuration_that_manifests_name_is_in_the_image() -> None:
    for manifest in RENDERED.glob("*.yaml"):
        for pod in pods_of(manifest):
            assert "--config=/opt/runner/configs/smollm3-3b.yaml" in pod.command()
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text()
    assert "WORKDIR /opt/runner\n" in dockerfile and "COPY deploy/configs configs\n" in dockerfile
    assert yaml.safe_load((RENDERED.parents[1] / "configs" / "smollm3-3b.yaml").read_text())["trainer"]
