"""Where each operator's variables put a node: recorded inputs, on one and two nodes, with one and eight GPUs."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from infra.kubelet import Pod
from infra.operators import pods_of, pytorchjob, trainjob

from runner.cli.options import load_program
from runner.cli.start import start
from runner.config.checks import check_has_rank, shape_of
from runner.errors import UsageError

RENDERED = Path(__file__).parents[3] / "deploy" / "kubernetes" / "rendered"


# Options that `start` takes for itself.
_OWN = (
    *("resume", "overwrite", "resume_from", "allow_changes", "resilient", "max_restarts", "grace", "metrics_port"),
    "debug",
)


def placement(words: list[str], environment: Mapping[str, str], gpus: int) -> tuple[int, int, int, str]:
    """Number of nodes, ranks of this node, its place, and where it looks for the first node."""
    options = start.make_context("start", words).params
    options["config_path"] = None  # in the image
    with mock.patch.dict(os.environ, environment, clear=True):
        _, config = load_program({name: value for name, value in options.items() if name not in _OWN})
    nnodes, ranks = shape_of(config, gpus)
    check_has_rank(config, nnodes)
    return nnodes, ranks, config.launch.node_rank, config.launch.endpoint if nnodes > 1 else ""


def placed(pod: Pod, gpus: int) -> tuple[int, int, int, str]:
    command = pod.command()
    return placement(command[2:] if command[0] == "runner" else command[1:], pod.variables(), gpus)


def document(manifest: str, kind: str) -> dict[str, Any]:
    found = [one for one in yaml.safe_load_all((RENDERED / f"{manifest}.yaml").read_text()) if one["kind"] == kind]
    return copy.deepcopy(found[0])


@pytest.fixture(autouse=True)
def _gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPUs are counted elsewhere; without one, nprocPerNode: gpu is refused."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("runner.config.checks.DEVICES", tmp_path)


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(
    ("manifest", "nodes", "endpoint"),
    [
        ("one-node", 1, ""),
        ("one-node-spot", 1, ""),
        ("nodes", 2, "train-node-0-0.train:29500"),
        ("pytorchjob", 1, ""),
        ("pytorchjob-nodes", 2, "train-master-0:23456"),
        ("several-nodes", 2, "train-node-0-0.train:29500"),
        ("several-nodes-efa", 2, "train-node-0-0.train:29500"),
        ("spot-workers", 4, "train-leader-0-0.train:29500"),
        ("trainjob", 2, "train-node-0-0.train:29500"),
    ],
)
def test_every_manifest_puts_each_pod_in_its_place(manifest: str, nodes: int, endpoint: str, gpus: int) -> None:
    """A TrainJob whose `requests` named no GPU got a rank for each of its 32 processors."""
    pods = pods_of(RENDERED / f"{manifest}.yaml")
    assert [placed(pod, gpus) for pod in pods] == [(nodes, gpus, rank, endpoint) for rank in range(nodes)]


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", ["auto", "gpu", "number"])
def test_a_pytorchjob_with_a_number_of_ranks(ranks: str, workers: int, gpus: int) -> None:
    """WORLD_SIZE counts ranks where nprocPerNode is a number, and pods where it is a word."""
    job = document("pytorchjob-nodes", "PyTorchJob")
    job["spec"]["nprocPerNode"] = str(gpus) if ranks == "number" else ranks
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = workers
    pods = pytorchjob(job)
    assert [placed(pod, gpus)[:3] for pod in pods] == [(1 + workers, gpus, rank) for rank in range(1 + workers)]


def test_an_elastic_pytorchjob_gives_no_node_a_rank() -> None:
    """All of its pods would be node 0, each with a run of its own in one folder."""
    job = document("pytorchjob-nodes", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    del replicas["Master"]
    replicas["Worker"]["replicas"] = 3
    job["spec"]["elasticPolicy"] = {"minReplicas": 2, "maxReplicas": 3}
    for pod in pytorchjob(job):
        with pytest.raises(UsageError, match=r"PET_NNODES.*--node-rank"):
            placed(pod, 8)
    # With a rank of its own, as its guide says, it is a node of an elastic run.
    for number, pod in enumerate(pytorchjob(job)):
        pod.environment.append({"name": "PET_NODE_RANK", "value": str(number)})
        assert placed(pod, 8) == (3, 8, number, "train-worker-0:23456")


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("ranks", [None, "number", "gpu"])
def test_a_trainjob_has_a_rank_for_each_gpu(ranks: str | None, nodes: int, gpus: int) -> None:
    job, runtime = document("trainjob", "TrainJob"), document("trainjob", "TrainingRuntime")
    trainer = job["spec"]["trainer"]
    trainer["numNodes"] = nodes
    for kind in ("requests", "limits"):
        trainer["resourcesPerNode"][kind]["nvidia.com/gpu"] = gpus
    if ranks is not None:
        trainer["numProcPerNode"] = gpus if ranks == "number" else ranks
    assert [placed(pod, gpus)[:3] for pod in trainjob(job, runtime)] == [(nodes, gpus, rank) for rank in range(nodes)]


# What others set, where people start the runner by themselves: variables of each node, options, and what is meant.
ELSEWHERE: dict[str, tuple[list[dict[str, str]], list[str], tuple[int, int]]] = {
    # docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html; a node's rank and number come from there.
    "AWS Batch": (
        [
            {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"},
            {
                "AWS_BATCH_JOB_NUM_NODES": "2",
                "AWS_BATCH_JOB_NODE_INDEX": "1",
                "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
            },
        ],
        [],
        (2, 8),
    ),
    # HyperPod runs Slurm, or PyTorchJobs, whose variables are theirs. Training jobs have SM_* alone: options say it.
    "SageMaker": (
        [{"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": f"algo-{n + 1}", "SM_NUM_GPUS": "8"} for n in (0, 1)],
        ["--nnodes=2", "--node-rank={node}", "--rdzv-endpoint=algo-1:29500"],
        (2, 8),
    ),
    "Slurm": (
        [{"SLURM_NNODES": "2", "SLURM_NODEID": str(n), "SLURM_PROCID": str(n), "SLURM_NTASKS": "2"} for n in (0, 1)],
        ["--nnodes=2:2", "--node-rank={node}", "--rdzv-endpoint=n1:21000"],
        (2, 8),
    ),
    "SkyPilot": (
        [{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(n), "SKYPILOT_NUM_GPUS_PER_NODE": "8"} for n in (0, 1)],
        ["--nnodes=2", "--node-rank={node}", "--nproc-per-node=8", "--rdzv-endpoint=10.0.0.7:29500"],
        (2, 8),
    ),
    # An actor for each node; Ray sets nothing that names a node's place.
    "Ray": (
        [{"RAY_ADDRESS": "10.0.0.7:6379", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"} for _ in (0, 1)],
        ["--nnodes=2", "--node-rank={node}", "--rdzv-endpoint=10.0.0.7:29500"],
        (2, 8),
    ),
    # Alibaba's DLC counts nodes in WORLD_SIZE; options say what is meant.
    "PAI-DLC": (
        [{"WORLD_SIZE": "2", "RANK": str(n), "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456"} for n in (0, 1)],
        ["--nnodes=2"],
        (2, 8),
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_other_schedulers_set_is_understood_or_overruled(name: str) -> None:
    nodes, options, (nnodes, ranks) = ELSEWHERE[name]
    for number, environment in enumerate(nodes):
        words = [word.format(node=number) for word in options]
        assert placement(words, environment, ranks)[:3] == (nnodes, ranks, number)
