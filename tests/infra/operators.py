"""What the operators of Kubernetes make of a manifest: its pods, with the variables that they add.

Sources, by the letter that the code refers to:

[K1] kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode: index in an annotation and in
     JOB_COMPLETION_INDEX; host name <job>-<index>.
[J1] jobset.sigs.k8s.io/docs/concepts: jobs <jobset>-<replicatedJob>-<i>, pods found at <job>-<index>.<jobset>.
[T1] kubeflow/training-operator v1.8 and v1.9, pkg/controller.v1/pytorch/envvar.go and master.go: WORLD_SIZE is pods
     times nprocPerNode, and pods alone where that is a word.
[T2] kubeflow/training-operator, elastic.go: an elasticPolicy sets PET_NNODES=MIN:MAX and the rendezvous, and no rank.
[T3] kubeflow/trainer v2.0 and v2.1, pkg/runtime/framework/plugins/torch/torch.go: ranks of a node are counted by
     resourcesPerNode: by `requests` if they name no GPU, whatever `limits` say.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from infra.kubelet import Pod

_INDEX = "batch.kubernetes.io/job-completion-index"
_MASTER_PORT = 23456
_TRAINER_PORT = 29500


def pods_of(manifest: Path) -> list[Pod]:
    """The pods of the only workload in a rendered manifest."""
    documents = {one["kind"]: one for one in yaml.safe_load_all(manifest.read_text()) if one}
    for kind, make in (("Job", _job), ("JobSet", _jobset), ("PyTorchJob", pytorchjob)):
        if kind in documents:
            return make(documents[kind])
    return trainjob(documents["TrainJob"], documents["TrainingRuntime"])


def _job(job: dict[str, Any]) -> list[Pod]:
    template = job["spec"]["template"]
    return [Pod(f"{job['metadata']['name']}-x7k2p", 0, template["spec"], _metadata(template))]


def _jobset(jobset: dict[str, Any]) -> list[Pod]:
    name = jobset["metadata"]["name"]
    return list(_pods_of_jobs(name, jobset["spec"]["replicatedJobs"]))


def _pods_of_jobs(name: str, replicated: list[dict[str, Any]]) -> Iterator[Pod]:
    """[J1]; the jobs of a set are numbered through."""
    node = index = 0
    for group in replicated:
        for number in range(group.get("replicas", 1)):
            spec = group["template"]["spec"]
            job = f"{name}-{group['name']}-{number}"
            for completion in range(spec.get("completions", 1)):
                template = copy.deepcopy(spec["template"])
                metadata = _metadata(template)
                metadata["annotations"]["jobset.sigs.k8s.io/job-index"] = str(number)
                metadata["annotations"]["jobset.sigs.k8s.io/job-global-index"] = str(index)
                own = []
                if spec.get("completionMode") == "Indexed":  # [K1]
                    metadata["annotations"][_INDEX] = str(completion)
                    own = [{"name": "JOB_COMPLETION_INDEX", "value": str(completion)}]
                host = f"{job}-{completion}"
                yield Pod(host, node, template["spec"], metadata, own, [f"{host}.{name}"])
                node += 1
            index += 1


def pytorchjob(job: dict[str, Any]) -> list[Pod]:
    """[T1], [T2]"""
    name, spec = job["metadata"]["name"], job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    total = sum(replica.get("replicas", 1) for replica in replicas.values())
    ranks = str(spec.get("nprocPerNode", "auto"))
    elastic = spec.get("elasticPolicy")
    found: list[Pod] = []
    for kind in ("Master", "Worker"):
        for number in range(replicas.get(kind, {}).get("replicas", 1) if kind in replicas else 0):
            rank = number + (kind == "Worker" and "Master" in replicas)
            variables = {"PYTHONUNBUFFERED": "1"}
            if "Master" in replicas:
                master = f"{name}-master-0"
                variables |= {"MASTER_PORT": str(_MASTER_PORT), "PET_MASTER_PORT": str(_MASTER_PORT)}
                variables |= {"MASTER_ADDR": master, "PET_MASTER_ADDR": master}
                world = total * int(ranks) if ranks.isdigit() else total
                variables |= {"WORLD_SIZE": str(world), "RANK": str(rank)}
                variables |= {"PET_NPROC_PER_NODE": ranks, "PET_NODE_RANK": str(rank)}
            if elastic:
                low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
                host = elastic.get("rdzvHost", f"{name}-worker-0")
                variables |= {"PET_RDZV_BACKEND": elastic.get("rdzvBackend", "c10d")}
                variables |= {"PET_RDZV_ENDPOINT": f"{host}:{elastic.get('rdzvPort', _MASTER_PORT)}"}
                variables |= {"PET_NNODES": f"{low}:{high}", "PET_MAX_RESTARTS": "3"}
            else:
                variables |= {"PET_NNODES": str(total)}
            template = copy.deepcopy(replicas[kind]["template"])
            environment = [{"name": key, "value": value} for key, value in variables.items()]
            host = f"{name}-{kind.lower()}-{number}"
            found.append(Pod(host, len(found), template["spec"], _metadata(template), environment))
    return found


def trainjob(job: dict[str, Any], runtime: dict[str, Any]) -> list[Pod]:
    """[T3]"""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    groups = copy.deepcopy(runtime["spec"]["template"]["spec"]["replicatedJobs"])
    (group,) = groups
    spec = group["template"]["spec"]
    spec |= {"completions": nodes, "completionMode": "Indexed"}
    (container,) = spec["template"]["spec"]["containers"]
    assert container["name"] == "node"
    resources = trainer.get("resourcesPerNode")
    container["resources"] = resources or container["resources"]
    ranks = str(trainer.get("numProcPerNode", runtime["spec"]["mlPolicy"]["torch"].get("numProcPerNode", "auto")))
    added = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": ranks_of_trainer(ranks, resources) if resources else ranks},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(_TRAINER_PORT)},
    ]
    container["env"] = [*container["env"], *added]
    return list(_pods_of_jobs(name, groups))


def ranks_of_trainer(ranks: str, resources: dict[str, Any]) -> str:
    """[T3]: `limits` decide only if they name no GPU."""

    def counted(named: dict[str, Any] | None) -> tuple[str, bool]:
        if named is None:
            return "1", False
        if ranks == "auto" and not any("gpu" in name.lower() for name in named):
            return str(max(1, int(named.get("cpu", 0)))), True
        return ranks, False

    found, by_processors = counted(resources.get("limits"))
    return found if by_processors else counted(resources.get("requests"))[0]


def _metadata(template: dict[str, Any]) -> dict[str, dict[str, str]]:
    metadata = template.get("metadata", {})
    return {kind: dict(metadata.get(kind, {})) for kind in ("labels", "annotations")}
