"""The files in deploy/ against real schemas; the exit codes against what each scheduler documents.

How each controller reacts to an exit code is tested in tests/unit/deploy, with the same files.
"""

from __future__ import annotations

import copy
import functools
import http.server
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import botocore.session
import kubernetes_validate
import psutil
import pytest
import yaml
from botocore.validate import ParamValidator
from infra.crd import problems
from infra.helm import helm
from infra.parts import find, needs
from unit.deploy.controllers import documents, unit
from unit.deploy.test_controllers import documented

from runner.cli.start import start
from runner.config.load import load_config, parse_setting
from runner.errors import ExitCode

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SOURCES = DEPLOY / "kubernetes"
KUBERNETES = sorted((SOURCES / "rendered").glob("*.yaml"), key=lambda path: path.stem)
STORAGE = sorted((SOURCES / "storage").glob("*/claims.yaml"))
KUBERNETES_VERSION = "1.34"
KUBEFLOW_START = DEPLOY / "kubernetes" / "kubeflow-start"
UNIT = DEPLOY / "spot" / "runner.service"
ENDED = DEPLOY / "spot" / "runner-ended"
# SIGKILL, and SIGTERM without a handler; both come from outside.
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
# Time from SIGTERM to SIGKILL in AWS Batch.
BATCH_STOP_S = 30
# Time that a supervisor may need to exit after its ranks have ended.
MARGIN_S = 5


def batch(name: str) -> Any:
    return json.loads((DEPLOY / "aws-batch" / f"{name}.json").read_text())


def job_definition() -> dict[str, Any]:
    definition: dict[str, Any] = batch("job-definition")
    return definition


# -- what is in the manifests ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pod:
    """A pod template of a manifest, and the Job that makes it, where it is one of Kubernetes' own."""

    name: str
    spec: dict[str, Any]
    job: dict[str, Any] | None = None

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def arguments(self) -> list[str]:
        return [*self.container.get("command", ["runner"]), *self.container["args"]]

    @property
    def environment(self) -> dict[str, Any]:
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in self.container["env"]}


def pods_of(document: dict[str, Any]) -> Iterator[Pod]:
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Job":
        yield Pod(kind, spec["template"]["spec"], spec)
    if kind == "PyTorchJob":
        for name, replica in spec["pytorchReplicaSpecs"].items():
            yield Pod(f"{kind}-{name}", replica["template"]["spec"])
    if kind in ("JobSet", "TrainingRuntime"):
        jobs = spec["replicatedJobs"] if kind == "JobSet" else spec["template"]["spec"]["replicatedJobs"]
        for replicated in jobs:
            job = replicated["template"]["spec"]
            yield Pod(f"{kind}-{replicated['name']}", job["template"]["spec"], job)


PODS = {
    f"{path.stem}-{pod.name}": pod for path in KUBERNETES for document in documents(path) for pod in pods_of(document)
}
JOBS = {name: pod.job for name, pod in PODS.items() if pod.job is not None}
# Those whose pods are nodes of one run.
SEVERAL = {name: pod for name, pod in PODS.items() if "--local-addr=$(POD_IP)" in pod.arguments}


@pytest.fixture(params=PODS)
def pod(request: pytest.FixtureRequest) -> Pod:
    return PODS[request.param]


def test_every_way_of_kubernetes_is_here() -> None:
    assert [path.stem for path in KUBERNETES] == [
        "nodes",
        "one-node",
        "one-node-spot",
        "pytorchjob",
        "pytorchjob-nodes",
        "several-nodes",
        "several-nodes-efa",
        "spot-workers",
        "trainjob",
    ]
    assert len(PODS) == 11 and len(JOBS) == 8 and len(SEVERAL) == 8


@needs("kustomize")
def test_the_rendered_files_are_those_of_the_overlays() -> None:
    result = subprocess.run([str(ROOT / "scripts" / "render-manifests"), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_pod_is_written_once() -> None:
    """Six copies of it had drifted apart."""
    sources = [path for path in SOURCES.rglob("*.yaml") if "rendered" not in path.parts]
    with_pod = [path.relative_to(SOURCES) for path in sources if re.search(r"^\s*containers:", path.read_text(), re.M)]
    assert with_pod == [Path("base/pod.yaml")]
    options = {path.name for path in (SOURCES / "options").iterdir()}
    used = re.findall(r"/options/([\w-]+)", "".join(path.read_text() for path in sources))
    assert options == {*used, "host-network", *OPTIONAL}


def test_the_folders_are_those_that_the_readme_lists() -> None:
    text = (DEPLOY / "README.md").read_text()
    listed = text[text.index("      base/") : text.index("      rendered/")]
    for folder in ("options", "workloads"):
        for path in (SOURCES / folder).iterdir():
            assert re.search(rf"[ \n]{path.name}\b(?!-)", listed), path
    assert all(f"overlays/{path.stem}" in text or f"`{path.stem}`" in text for path in KUBERNETES)


def test_two_plain_nodes_need_nothing_but_jobset() -> None:
    """The only overlay of several nodes had objects of the Prometheus operator, RDMA devices and a queue of Kueue."""
    items = documents(SOURCES / "rendered" / "nodes.yaml")
    assert sorted(item["kind"] for item in items) == ["JobSet", "NetworkPolicy"]
    assert not any("labels" in item["metadata"] for item in items)
    container = PODS["nodes-JobSet-node"].container
    assert set(container["resources"]["limits"]) == {"memory", "nvidia.com/gpu"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


# Options that no overlay has.
OPTIONAL = {"exclusive-topology", "gang-scheduling", "kueue-topology", "one-gpu", "restart-in-place"}
# Options that change the workload, so they are listed after it, and the kinds that they know.
AFTER = {"kueue": "", "exclusive-topology": "JobSet", "gang-scheduling": "PyTorchJob"}


def kustomize(folder: Path, workload: str, *options: str) -> list[dict[str, Any]]:
    """The objects of a workload with options."""
    program = find("kubectl")
    assert program is not None
    before = [f"options/{option}" for option in options if option not in AFTER]
    after = [f"options/{option}" for option in options if option in AFTER]
    paths = [os.path.relpath(SOURCES / path, folder) for path in [*before, f"workloads/{workload}", *after]]
    kustomization = {"resources": [os.path.relpath(SOURCES / "base", folder)], "components": paths}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    done = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@functools.cache
def plain(workload: str) -> list[dict[str, Any]]:
    """The objects of a workload without options."""
    with tempfile.TemporaryDirectory() as folder:
        return kustomize(Path(folder), workload)


@needs("kubectl")
@pytest.mark.parametrize("option", sorted(path.name for path in (SOURCES / "options").iterdir()))
def test_every_option_fits_every_workload(option: str, tmp_path: Path) -> None:
    for workload in sorted(path.name for path in (SOURCES / "workloads").iterdir()):
        if option == "several-nodes":
            continue  # the workloads of several nodes have it
        items = kustomize(tmp_path, workload, option)
        kinds = {item["kind"] for item in items}
        assert "NetworkPolicy" in kinds
        if AFTER.get(option, "") in {"", *kinds}:
            assert items != plain(workload), f"{option} has no effect on {workload}"
        for item in items:
            check_pods(item)


@needs("kubectl")
def test_a_share_of_a_node_is_asked_for(tmp_path: Path) -> None:
    (job,) = [item for item in kustomize(tmp_path, "job", "one-gpu") if item["kind"] == "Job"]
    (pod,) = pods_of(job)
    resources = pod.container["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1
    whole = PODS["one-node-Job"].container["resources"]["requests"]
    assert int(resources["requests"]["cpu"]) * 4 <= int(whole["cpu"])


@needs("kubectl")
def test_nodes_are_placed_next_to_each_other(tmp_path: Path) -> None:
    (jobset,) = [item for item in kustomize(tmp_path, "jobset", "exclusive-topology") if item["kind"] == "JobSet"]
    assert set(jobset["metadata"]["annotations"]) == {"alpha.jobset.sigs.k8s.io/exclusive-topology"}
    (jobset,) = [item for item in kustomize(tmp_path, "jobset", "kueue-topology", "kueue") if item["kind"] == "JobSet"]
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert "kueue.x-k8s.io/podset-preferred-topology" in template["metadata"]["annotations"]
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    items = kustomize(tmp_path, "pytorchjob-nodes", "gang-scheduling")
    (job,) = [item for item in items if item["kind"] == "PyTorchJob"]
    assert problems(job, "pytorchjobs.yaml") == []
    nodes = sum(replica["replicas"] for replica in job["spec"]["pytorchReplicaSpecs"].values())
    assert job["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == nodes


@needs("kubectl")
def test_a_container_restarts_in_place_only_where_the_node_is_fine(tmp_path: Path) -> None:
    (job,) = [item for item in kustomize(tmp_path, "job", "restart-in-place") if item["kind"] == "Job"]
    (pod,) = pods_of(job)
    (rule,) = pod.container["restartPolicyRules"]
    counted = {code for code, row in documented().items() if row["Job, JobSet, Trainer 2"] == "again, counts"}
    assert set(rule["exitCodes"]["values"]) == counted - {ExitCode.BAD_NODE}
    # The Job's rules still apply to what ends the pod.
    assert pod.spec["restartPolicy"] == pod.container["restartPolicy"] == "Never"


def test_the_last_lines_are_the_termination_message(pod: Pod) -> None:
    """`kubectl describe pod` said Error and nothing else."""
    assert pod.container["terminationMessagePolicy"] == "FallbackToLogsOnError"


class Cluster(http.server.BaseHTTPRequestHandler):
    """As much of an API server as `kubectl get`, `cordon` and `label` ask for."""

    objects: ClassVar[dict[str, dict[str, Any]]] = {}
    patched: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        kinds = [
            {"name": name, "kind": kind, "namespaced": kind == "Pod", "verbs": ["get", "list", "patch"]}
            for name, kind in (("pods", "Pod"), ("nodes", "Node"))
        ]
        answers: dict[str, dict[str, Any]] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": kinds},
            **self.objects,
        }
        if path == "/api/v1/namespaces/training/pods":
            asked = {key: value for key, (value,) in urllib.parse.parse_qs(query).items()}
            assert asked["labelSelector"] == "app.kubernetes.io/name=runner,!runner-cordoned"
            assert asked["fieldSelector"] == "status.phase=Failed"
            pods = [item for item in self.objects.values() if item["kind"] == "Pod"]
            new = [pod for pod in pods if "runner-cordoned" not in pod["metadata"]["labels"]]
            answers[path] = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": new}
        self.answer(answers.get(path))

    def do_PATCH(self) -> None:
        path = self.path.partition("?")[0]
        change = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.patched.append((path, change))
        self.objects[path]["metadata"].setdefault("labels", {}).update(change.get("metadata", {}).get("labels", {}))
        self.answer(self.objects[path])

    def answer(self, body: dict[str, Any] | None) -> None:
        text = json.dumps(body or {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}).encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@needs("kubectl")
def test_nodes_of_pods_that_ended_with_80_are_cordoned_once(tmp_path: Path) -> None:
    """The Job's next pod came back to the same node."""
    ends = {"pod-a": (80, "bad-node"), "pod-b": (75, "good-node"), "pod-c": (180, "other-node")}
    for name, (code, node) in ends.items():
        labels = {"app.kubernetes.io/name": "runner"}
        Cluster.objects[f"/api/v1/namespaces/training/pods/{name}"] = {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {"name": name, "namespace": "training", "labels": labels},
            "spec": {"nodeName": node, "containers": [{"name": "runner"}]},
            "status": {
                "phase": "Failed",
                "containerStatuses": [{"name": "runner", "state": {"terminated": {"exitCode": code}}}],
            },
        }
        Cluster.objects[f"/api/v1/nodes/{node}"] = {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {"name": node},
            "spec": {},
        }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = [f"--server=http://127.0.0.1:{server.server_port}", "--namespace=training"]
    # The options of `kubectl get`; the other commands find the server in the configuration.
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": ""}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}
    script = str(SOURCES / "cordon-bad-nodes")
    try:
        for _ in range(2):
            subprocess.run(["sh", script, "--once", *options], env=environment, check=True, timeout=60)
    finally:
        server.shutdown()
        server.server_close()
    cordon, label = Cluster.patched
    assert cordon == ("/api/v1/nodes/bad-node", {"spec": {"unschedulable": True}})
    assert label[0] == "/api/v1/namespaces/training/pods/pod-a"


# -- schemas -----------------------------------------------------------------------------------------------------------


def check_pods(document: dict[str, Any]) -> None:
    """The schema of a custom object does not look into the templates; those of Kubernetes do."""
    for pod in pods_of(document):
        if pod.job is not None:
            wrapped = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": pod.job}
        else:
            wrapped = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
        kubernetes_validate.validate(wrapped, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("path", [*KUBERNETES, *STORAGE], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_kubernetes_own_objects_are_valid(path: Path) -> None:
    for document in documents(path):
        if document["kind"] in ("Job", "NetworkPolicy", "PersistentVolumeClaim"):
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        check_pods(document)


def test_a_disk_is_made_where_its_pod_can_run() -> None:
    """Bound at once, the two claims may be in two zones, and no node has both."""
    (storage,) = documents(SOURCES / "storage" / "class" / "storage-class.yaml")
    kubernetes_validate.validate(storage, KUBERNETES_VERSION, strict=True)
    assert storage["volumeBindingMode"] == "WaitForFirstConsumer" and storage["reclaimPolicy"] == "Retain"
    own = documents(SOURCES / "storage" / "one-node" / "claims.yaml")
    assert {claim["spec"]["storageClassName"] for claim in own} == {storage["metadata"]["name"]}


def test_the_schemas_find_a_misspelt_field() -> None:
    path = SOURCES / "rendered" / "one-node.yaml"
    (job,) = [copy.deepcopy(document) for document in documents(path) if document["kind"] == "Job"]
    job["spec"]["podFailurPolicy"] = job["spec"].pop("podFailurePolicy")
    with pytest.raises(kubernetes_validate.ValidationError, match="podFailurPolicy"):
        kubernetes_validate.validate(job, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize(
    ("manifest", "kind", "crd"),
    [
        ("pytorchjob.yaml", "PyTorchJob", "pytorchjobs.yaml"),
        ("pytorchjob-nodes.yaml", "PyTorchJob", "pytorchjobs.yaml"),
        ("trainjob.yaml", "TrainJob", "trainjobs.yaml"),
    ],
)
def test_kubeflow_objects_are_valid(manifest: str, kind: str, crd: str) -> None:
    items = documents(SOURCES / "rendered" / manifest)
    (document,) = [copy.deepcopy(item) for item in items if item["kind"] == kind]
    assert problems(document, crd) == []
    document["spec"]["unheardOf"] = 1
    assert "unheardOf" in "".join(problems(document, crd))


def assert_takes(service: str, operation: str, parameters: dict[str, Any]) -> None:
    shape = botocore.session.get_session().get_service_model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(parameters, shape)
    assert not report.has_errors(), report.generate_report()


@pytest.mark.parametrize("name", ["job-definition", "multi-node-job-definition"])
def test_the_job_definition_is_what_the_aws_api_takes(name: str) -> None:
    definition = batch(name)
    assert_takes("batch", "RegisterJobDefinition", definition)
    # Limits that the API reference states in addition to the model.
    strategy = definition["retryStrategy"]
    assert 1 <= strategy["attempts"] <= 10 and len(strategy["evaluateOnExit"]) <= 5
    for condition in strategy["evaluateOnExit"]:
        assert re.fullmatch(r"\d+\*?", condition.get("onExitCode", "0"))
        assert re.fullmatch(r"[\w.:\s]+\*?", condition.get("onStatusReason", "x"))
    assert strategy == job_definition()["retryStrategy"]


def test_nodes_of_aws_batch_find_the_main_one() -> None:
    """The main node's address is in the others' environment alone: docs.aws.amazon.com/batch, mnp-env-vars."""
    properties = batch("multi-node-job-definition")["nodeProperties"]
    main, others = properties["nodeRangeProperties"]
    assert (main["targetNodes"], others["targetNodes"], properties["mainNode"]) == ("0", "1:", 0)
    for number, group in ((0, main), (1, others)):
        environment = {entry["name"]: entry["value"] for entry in group["container"]["environment"]}
        environment |= {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": str(number)}
        if number:
            environment["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "10.0.0.7"
        options = start.make_context("start", group["container"]["command"][1:]).params
        launch = load_config(None, environment, [parse_setting(text) for text in options["settings"]]).launch
        assert (launch.nnodes, launch.node_rank) == (2, number)
        assert launch.endpoint == f"{'10.0.0.7' if number else '127.0.0.1'}:29500"
        # A node that is lost is not replaced within an attempt.
        assert launch.rendezvous_timeout_s == 300
    assert main["container"]["command"] == others["container"]["command"]


def resubmit_rules(folder: Path, *arguments: str) -> list[list[str]]:
    """The calls of `aws` that the script makes."""
    folder.mkdir(exist_ok=True)
    said = folder / "said"
    program(folder / "aws", f"printf '%s\\0' \"$@\" >>{said}; echo >>{said}")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(DEPLOY / "aws-batch" / "resubmit-rules"), *arguments], env=environment, check=True)
    return [call.split("\0") for call in said.read_text().split("\0\n") if call]


def test_a_job_that_has_spent_its_attempts_is_submitted_again() -> None:
    pattern, targets = batch("resubmit-pattern"), batch("resubmit-targets")
    again = {code for code, row in documented().items() if row["AWS Batch"] == "again"}
    # What a user has terminated has the user's reason; a machine that is gone has no exit code.
    exited, gone = pattern["detail"]["$or"]
    assert set(exited["container"]["exitCode"]) == again | {143}
    assert exited["statusReason"] == [{"prefix": "Essential container in task exited"}]
    assert gone == {"statusReason": [{"prefix": "Host EC2"}]}
    # A strategy here would replace that of the definition, with its conditions: 78 would be tried ten times.
    assert set(targets[0]["BatchParameters"]) == {"JobDefinition", "JobName"}


@pytest.mark.parametrize("name", ["train", "train-nodes"])
def test_a_job_is_not_submitted_again_for_ever(name: str, tmp_path: Path) -> None:
    """One rule submitted the job under its own name, which the rule matched again."""
    calls = resubmit_rules(tmp_path / "put", "put", name, "3")
    patterns, targets = {}, {}
    for _, operation, *options in calls:
        given = dict(zip(options[::2], options[1::2], strict=True))
        if operation == "put-rule":
            patterns[given["--name"]] = pattern = json.loads(given["--event-pattern"])
            assert_takes("events", "PutRule", {"Name": given["--name"], "EventPattern": json.dumps(pattern)})
        else:
            targets[given["--rule"]] = target = json.loads(given["--targets"])
            assert_takes("events", "PutTargets", {"Rule": given["--rule"], "Targets": target})
    chain = {}
    for rule, pattern in patterns.items():
        if "again" in rule:
            (job,) = pattern["detail"]["jobName"]
            chain[job] = targets[rule][0]["BatchParameters"]
    follow = f"{name}-0"
    names: list[str] = []
    while follow in chain:
        assert len(names) < 4
        names.append(follow)
        assert chain[follow]["JobDefinition"] == name
        follow = chain[follow]["JobName"]
    assert [*names, follow] == [f"{name}-{number}" for number in range(4)] and len(names) == len(chain)
    # Its end is reported, and so is one that no start would change.
    last, final = patterns[f"{name}-ended"]["detail"]["$or"]
    assert last == {"jobName": [follow]} and final["jobName"] == [{"prefix": f"{name}-"}]
    assert set(final["container"]["exitCode"]) == {
        code for code, row in documented().items() if row["AWS Batch"] == "fail"
    }
    removed = resubmit_rules(tmp_path / "remove", "remove", name, "3")
    deleted = {call[call.index("--name") + 1] for call in removed if "delete-rule" in call}
    emptied = {call[call.index("--rule") + 1]: call[call.index("--ids") + 1] for call in removed if "--ids" in call}
    assert deleted == set(patterns)
    assert emptied == {rule: target[0]["Id"] for rule, target in targets.items()}


@needs("systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    analyze = find("systemd-analyze")
    assert analyze is not None
    # The unit's program is not installed here; the check needs one that is.
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"/opt/venv/bin/runner|/usr/local/sbin/runner-ended", "/bin/true", UNIT.read_text()))
    result = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr.strip(), result.stderr


def test_user_data_installs_this_unit_and_a_valid_job(tmp_path: Path) -> None:
    text = (DEPLOY / "spot" / "user-data.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    files = {entry["path"]: entry["content"] for entry in yaml.safe_load(text)["write_files"]}
    assert files["/etc/systemd/system/runner.service"] == UNIT.read_text()
    assert files["/usr/local/sbin/runner-ended"] == ENDED.read_text()
    (tmp_path / "job.yaml").write_text(files["/etc/runner/job.yaml"])
    load_config(str(tmp_path / "job.yaml"), {})
    variables = set(re.findall(r"\$\{(\w+)}", unit()["Service"]["ExecStart"]))
    assert variables == {"CLOUD", "CHECKPOINTS"}
    assert variables <= {line.partition("=")[0] for line in files["/etc/runner/environment"].splitlines()}


# -- exit codes --------------------------------------------------------------------------------------------------------


def test_every_exit_code_is_documented() -> None:
    assert set(documented()) == {int(code) for code in ExitCode} | {137}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_may_have_a_failure_policy(name: str) -> None:
    """The API server refuses it with another restartPolicy; a second pod next to the first would be fenced."""
    assert PODS[name].spec["restartPolicy"] == "Never"
    assert JOBS[name]["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize("name", JOBS)
def test_failures_are_counted_by_node(name: str) -> None:
    """One fault that ended all nodes counted as N failures against a limit of six for the whole Job."""
    job = JOBS[name]
    if job.get("parallelism", 1) > 1 or name.startswith("trainjob"):
        assert job["backoffLimitPerIndex"] > 0 and "backoffLimit" not in job
        # A node that is given up ends the run: the others would wait for it, and then for each other.
        assert job["maxFailedIndexes"] == 0
        assert name.startswith("trainjob") or job["completionMode"] == "Indexed"
    else:
        assert job["backoffLimit"] > 0


def test_the_others_wait_longer_than_a_node_takes_to_be_replaced() -> None:
    """Job controller: 10 s x 2^(n-1), at most 10 min, by failures that are ignored, too (MaxJobPodFailureBackOff)."""
    for pod in SEVERAL.values():
        (limit,) = re.findall(r"launch.rendezvous_timeout_s=(\d+)", " ".join(pod.arguments))
        evicted = max(toleration.get("tolerationSeconds", 0) for toleration in pod.spec["tolerations"])
        assert int(limit) >= 600 + evicted + 50 + 1200


def test_a_dead_node_is_given_up_soon(pod: Pod) -> None:
    """Kubernetes' default is 300 s."""
    waits = {toleration["key"]: toleration.get("tolerationSeconds") for toleration in pod.spec["tolerations"]}
    assert waits["node.kubernetes.io/unreachable"] == waits["node.kubernetes.io/not-ready"] == 30


@pytest.mark.parametrize("code", [*(str(int(code)) for code in ExitCode), "KILL", ""])
def test_no_vm_is_paid_for_after_the_end_of_its_run(code: str, tmp_path: Path) -> None:
    """A unit that had failed, or was done, left the VM running."""
    said = tmp_path / "said"
    program(tmp_path / "systemctl", f'echo "$@" >>{shlex.quote(str(said))}')
    program(tmp_path / "scale-to-zero", f"echo zero >>{shlex.quote(str(said))}")
    script = tmp_path / "runner-ended"
    script.write_text(ENDED.read_text().replace("/etc/runner/", f"{tmp_path}/"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "EXIT_STATUS": code}
    subprocess.run(["sh", str(script)], check=True, env=environment)
    lines = said.read_text().splitlines() if said.exists() else []
    decision = documented()[int(code)]["systemd"] if code.isdigit() else "again"
    poweroff = ["--no-block poweroff"]
    assert lines == {"again": [], "VM off": poweroff, "group to 0, VM off": ["zero", *poweroff]}[decision]


def test_a_vm_whose_run_goes_on_elsewhere_does_not_end_its_group(tmp_path: Path) -> None:
    """While a group replaces a VM, both may run for a while."""
    said, journal = tmp_path / "said", tmp_path / "journal.jsonl"
    for name in ("systemctl", "scale-to-zero"):
        program(tmp_path / name, f"echo {name} >>{shlex.quote(str(said))}")
    script = tmp_path / "runner-ended"
    text = ENDED.read_text().replace("/etc/runner/", f"{tmp_path}/")
    script.write_text(text.replace("/var/lib/runner/run/journal.jsonl", str(journal)))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "EXIT_STATUS": "78"}
    for kinds, ends in ((["crashed", "fenced"], False), (["fenced", "crashed"], True)):
        ended = [{"event": "attempt_ended", "kind": kind} for kind in kinds]
        journal.write_text("".join(json.dumps(line) + "\n" for line in [*ended, {"event": "run_ended"}]))
        subprocess.run(["sh", str(script)], check=True, env=environment)
        assert said.exists() is ends


def test_the_unit_outlives_a_rank_that_was_short_of_memory() -> None:
    service = unit()["Service"]
    assert service["OOMPolicy"] == "continue"
    assert service["ExecStopPost"] == "+/usr/local/sbin/runner-ended"
    assert unit()["Unit"]["StartLimitAction"] == "poweroff"


@pytest.mark.parametrize("version", ["3.10.12", "3.12.3"])
def test_the_installation_ends_at_an_error_and_has_a_python(version: str, tmp_path: Path) -> None:
    """cloud-init's runcmd continues after errors; Ubuntu 22.04 has Python 3.10."""
    files = {
        entry["path"]: entry["content"]
        for entry in yaml.safe_load((DEPLOY / "spot" / "user-data.yaml").read_text())["write_files"]
    }
    said = tmp_path / "said"
    install = files["/usr/local/sbin/install-runner"].replace("/opt/", f"{tmp_path}/opt/")
    (tmp_path / "install").write_text(install)
    old = version.startswith("3.10")
    log = f'echo "$(basename "$0") $*" >>{said}'
    program(tmp_path / "curl", log)
    program(tmp_path / "tar", log)
    program(tmp_path / "systemctl", log)
    # `python3 -c` answers for the version; `-m venv` makes a folder with programs.
    program(tmp_path / "template", log)
    fake = f"""{log}
        case "$1" in -c) exit {int(old)} ;; esac
        mkdir -p "$3/bin"
        for name in pip uv; do cp {tmp_path}/template "$3/bin/$name"; done"""
    program(tmp_path / "python3", fake)
    (tmp_path / "opt" / "venv" / "bin").mkdir(parents=True)
    program(tmp_path / "opt" / "venv" / "bin" / "pip", log)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-e", str(tmp_path / "install")], check=True, env=environment)
    text = said.read_text()
    assert ("uv venv --seed --python 3.11" in text) is old
    assert "systemctl enable --now runner.service" in text
    program(tmp_path / "tar", "exit 2")
    said.unlink()
    assert subprocess.run(["sh", "-e", str(tmp_path / "install")], env=environment).returncode == 2
    assert "systemctl" not in said.read_text()


SKYPILOT = DEPLOY / "skypilot" / "train.yaml"


@needs("SkyPilot")
def test_skypilot_takes_the_job() -> None:
    """Against SkyPilot's own schema, where it is installed; it was with 0.14.1 (sky.Task.from_yaml) on 2026-11-23."""
    sky = importlib.import_module("sky")
    assert sky.Task.from_yaml(str(SKYPILOT)).num_nodes == 2


@pytest.mark.parametrize("code", [*ExitCode, *KILLED])
def test_skypilot_decides_as_documented(code: int, tmp_path: Path) -> None:
    job = yaml.safe_load(SKYPILOT.read_text())
    recovery = job["resources"]["job_recovery"]
    assert recovery["max_restarts_on_errors"] == 0 and recovery["strategy"] == "EAGER_NEXT_REGION"
    home = tmp_path / "venv" / "bin"
    home.mkdir(parents=True)
    program(home / "runner", f'echo "$@" >{tmp_path}/said\nexit {int(code)}')
    environment = {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        **job["envs"],
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    }
    ended = subprocess.run(["bash", "-c", job["run"]], env=environment).returncode
    # sky/jobs/recovery_strategy.py: one node's code that is listed is enough; the others, ended with it, count as 137.
    restarts = bool({ended, 137} & set(recovery["recover_on_exit_codes"]))
    expected = documented().get(code, documented()[137])["SkyPilot"]
    assert expected == ("complete" if ended == 0 else "again" if restarts else "fail")
    command, *arguments = (tmp_path / "said").read_text().split()
    options = start.make_context("start", list(arguments)).params
    assert command == "start" and options["config_path"] == "deploy/configs/smollm3-3b.yaml"
    assert "10.0.0.7:29500" in arguments and grace(arguments) + MARGIN_S <= 30


SHELLS = [shell for shell in ("dash", "bash") if find(shell)]
DSTACK = DEPLOY / "dstack" / "train.dstack.yml"


@needs("dstack")
def test_dstack_takes_the_task_and_retries_lost_machines_alone() -> None:
    """Against dstack's own models, where it is installed; it was with 0.22.5 on 2026-11-29."""
    configurations = importlib.import_module("dstack._internal.core.models.configurations")
    runs = importlib.import_module("dstack._internal.core.models.runs")
    task = configurations.parse_run_configuration(yaml.safe_load(DSTACK.read_text()))
    assert task.nodes == 2 and task.resources.gpu.count.min == 8
    reasons = runs.JobTerminationReason
    assert reasons.INTERRUPTED_BY_NO_CAPACITY.to_retry_event() in task.retry.on_events
    assert reasons.CONTAINER_EXITED_WITH_ERROR.to_retry_event() not in task.retry.on_events


def dstack_task(shell: str, folder: Path, runner: str, **variables: str) -> subprocess.Popen[bytes]:
    """The task's command with this runner; `starts` in the folder has a line for each start."""
    task = yaml.safe_load(DSTACK.read_text())
    assert task["entrypoint"] == "sh -c"
    program(folder / "runner", f'echo "$@" >>{folder}/starts\n{runner}')
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CHECKPOINTS": "s3://b/r",
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_GPUS_PER_NODE": "8",
        "DSTACK_MASTER_NODE_IP": "10.0.0.7",
        **variables,
    }
    return subprocess.Popen([shell, "-c", *task["commands"]], env=environment)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("code", [*ExitCode, KILLED[0]])
def test_dstack_decides_as_documented(shell: str, code: int, tmp_path: Path) -> None:
    ending = f"exit {int(code)}" if code < 128 else "kill -KILL $$"
    first = f"[ $(wc -l <{tmp_path}/starts) -gt 1 ] && exit 0\n{ending}"
    ended = dstack_task(shell, tmp_path, first, PAUSE="0").wait(30)
    starts = (tmp_path / "starts").read_text().splitlines()
    said = "again" if len(starts) == 2 and ended == 0 else "complete" if ended == 0 else "fail"
    if said == "again" and code != ExitCode.PREEMPTED:
        assert dstack_task(shell, tmp_path, ending, PAUSE="0", MAX_FAILURES="0").wait(30) == code
        said = "again, counts"
    assert said == documented()[int(code)]["dstack"]
    command, *arguments = starts[0].split()
    options = start.make_context("start", list(arguments)).params
    assert command == "start" and options["config_path"] == "/opt/runner/configs/smollm3-3b.yaml"
    # It is killed 10 s after the interrupt.
    assert "10.0.0.7:29500" in arguments and grace(arguments) + MARGIN_S <= 10


@pytest.mark.parametrize("shell", SHELLS)
def test_a_stop_of_dstack_reaches_the_runner_once(shell: str, tmp_path: Path) -> None:
    """Its agents signal the shell or its process group; a second signal would end the runner at once."""
    runner = f"""trap 'echo stopped >>{tmp_path}/said' TERM INT
        echo started >>{tmp_path}/said
        until grep -q stopped {tmp_path}/said; do sleep 0.05; done
        sleep 0.5
        exit 75"""
    process = dstack_task(shell, tmp_path, runner)
    wait_for(tmp_path / "said", "started")
    for child in psutil.Process(process.pid).children(recursive=True):
        assert os.getpgid(child.pid) != os.getpgid(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 75
    assert (tmp_path / "said").read_text().split() == ["started", "stopped"]
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("code", [*ExitCode, KILLED[0]])
def test_kubeflow_start_decides_as_documented(shell: str, code: int, tmp_path: Path) -> None:
    ending = f"exit {int(code)}" if code < 128 else "kill -KILL $$"
    program(tmp_path / "runner", f'[ "$*" = "start --grace=90 two words" ] || exit 99\n{ending}')
    # 74 and 76 are tried again in the container.
    result = kubeflow_start(shell, tmp_path, "--grace=90", "two words", MAX_FAILURES="0")
    result.wait(30)
    # restartPolicy ExitCode: https://www.kubeflow.org/docs/components/trainer/legacy-v1
    decision = "complete" if result.returncode == 0 else "again" if result.returncode >= 128 else "fail"
    if code in (74, 76):
        assert (decision, documented()[code]["PyTorchJob"]) == ("fail", "again, counts")
    else:
        assert decision == documented()[code]["PyTorchJob"]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_kubeflow_start_passes_a_stop_on_and_waits(shell: str, number: signal.Signals, tmp_path: Path) -> None:
    ready, go_on = tmp_path / "ready", tmp_path / "go-on"
    os.mkfifo(go_on)
    program(
        tmp_path / "runner",
        f"""trap 'echo stopped >>{ready}' TERM
        echo started >>{ready}
        until grep -q stopped {ready}; do sleep 0.05; done
        read _ <{go_on}
        exit 75""",
    )
    process = kubeflow_start(shell, tmp_path)
    wait_for(ready, "started")
    process.send_signal(number)
    wait_for(ready, "stopped")
    assert process.poll() is None, "it ended before the run had committed"
    go_on.write_text("commit\n")
    assert process.wait(30) == 75 + 128


@pytest.mark.parametrize("shell", SHELLS)
def test_kubeflow_start_tries_again_what_may_pass(shell: str, tmp_path: Path) -> None:
    """Storage that was unreachable for a minute ended the job."""
    starts = tmp_path / "starts"
    program(tmp_path / "runner", f"echo x >>{starts}\n[ $(wc -l <{starts}) -gt 2 ] && exit 0\nexit 74")
    assert kubeflow_start(shell, tmp_path, PAUSE="0").wait(30) == 0
    assert len(starts.read_text().split()) == 3
    program(tmp_path / "runner", f"echo x >>{starts}\nexit 76")
    assert kubeflow_start(shell, tmp_path, PAUSE="0", MAX_FAILURES="2").wait(30) == 76
    assert len(starts.read_text().split()) == 6


@pytest.mark.parametrize("shell", SHELLS)
def test_a_stop_ends_the_pause_of_kubeflow_start(shell: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program(tmp_path / "runner", f"echo started >>{ready}\nexit 74")
    process = kubeflow_start(shell, tmp_path, PAUSE="600")
    wait_for(ready, "started")
    # Until it sleeps.
    deadline = time.monotonic() + 30
    while not any(child.name() == "sleep" for child in psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
    process.terminate()
    assert process.wait(30) == 75 + 128


def kubeflow_start(shell: str, folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.Popen([shell, str(KUBEFLOW_START), *arguments], env=environment)


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def wait_for(path: Path, word: str) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or word not in path.read_text():
        assert time.monotonic() < deadline, f"{word} was not said"
        time.sleep(0.02)


# -- what the commands say ---------------------------------------------------------------------------------------------


def grace(arguments: list[str]) -> float:
    (value,) = re.findall(r"--grace[= ](\S+)", " ".join(arguments))
    return float(value)


def test_the_grace_ends_before_the_pod_is_killed(pod: Pod) -> None:
    assert grace(pod.arguments) + MARGIN_S <= pod.spec["terminationGracePeriodSeconds"]


def test_the_grace_ends_before_batch_and_systemd_kill() -> None:
    assert grace(job_definition()["containerProperties"]["command"]) + MARGIN_S <= BATCH_STOP_S
    service = unit()["Service"]
    assert grace(service["ExecStart"].split()) + MARGIN_S <= float(service["TimeoutStopSec"])
    # SIGTERM to the whole group would reach the ranks, not only the supervisor.
    assert service["KillMode"] == "mixed"


def unit_command(nodes: str) -> list[str]:
    """As systemd makes it of the environment file."""
    command = unit()["Service"]["ExecStart"].replace("${CHECKPOINTS}", "s3://b/r")
    return shlex.split(command.replace("$NODES", nodes))


SPOT_GUIDE = (DEPLOY.parent / "docs" / "guides" / "spot-vm.md").read_text()
(WORKER_NODES,) = re.findall(r"^NODES=(.*--node-rank RANK.*?)\s+#", SPOT_GUIDE, re.MULTILINE)
COMMANDS = {
    **{name: pod.arguments for name, pod in PODS.items()},
    "aws-batch": ["runner", *job_definition()["containerProperties"]["command"]],
    "systemd": unit_command(""),
    "systemd, spot worker": unit_command(WORKER_NODES.replace("RANK", "4711")),
}


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("name", COMMANDS)
def test_runner_understands_the_command(name: str, cloud: str) -> None:
    program, *arguments = (word.replace("${CLOUD}", cloud) for word in COMMANDS[name])
    if program != "kubeflow-start":
        assert Path(program).name == "runner" and arguments.pop(0) == "start"
    options = start.make_context("start", arguments).params
    assert options["program"] is None
    path = (options["config_path"] or "").replace("/opt/runner/configs", str(DEPLOY / "configs"))
    if path == "/etc/runner/job.yaml":
        path = ""  # test_user_data_installs_this_unit_and_a_valid_job
    load_config(path or None, {}, [parse_setting(text) for text in options["settings"]])


def test_several_machines_find_each_other() -> None:
    """The port after the rendezvous port is the runners' own (launch.peer_port)."""
    for pod in SEVERAL.values():
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        first = ports.get("rendezvous") or ports["pytorchjob-port"]  # by this name the operator finds MASTER_PORT
        assert ports["peers"] == first + 1
        assert pod.environment["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert {pod.container["name"] for name, pod in PODS.items() if "PyTorchJob" in name} == {"pytorch"}
    assert {pod.container["name"] for name, pod in PODS.items() if "TrainingRuntime" in name} == {"node"}


def test_each_node_of_a_jobset_has_its_own_rank() -> None:
    def rank(pod: Pod) -> str:
        field = pod.environment["PET_NODE_RANK"]["fieldRef"]["fieldPath"]
        assert isinstance(field, str)
        return field

    for path in KUBERNETES:
        for document in documents(path):
            if document["kind"] != "JobSet":
                continue
            name = document["metadata"]["name"]
            assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
            assert document["spec"]["network"]["enableDNSHostnames"]
            jobs = document["spec"]["replicatedJobs"]
            pods = list(pods_of(document))
            num_nodes = 0
            for job, pod in zip(jobs, pods, strict=True):
                spec = job["template"]["spec"]
                num_nodes += job["replicas"] * spec["parallelism"]
                assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
                assert pod.environment["PET_MASTER_ADDR"] == f"{name}-{jobs[0]['name']}-0-0.{name}"
                assert pod.environment["PET_MASTER_PORT"] == str(pod.container["ports"][0]["containerPort"])
                # One pod each, and the Job's index in the JobSet; or one Job, and the pod's index in that.
                by_job = rank(pod) == "metadata.annotations['jobset.sigs.k8s.io/job-global-index']"
                assert by_job == (spec["parallelism"] == 1)
                assert by_job or rank(pod) == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                assert by_job or len(jobs) == job["replicas"] == 1
            assert {pod.environment["PET_NNODES"] for pod in pods} == {str(num_nodes)}


def test_a_leader_is_not_on_a_spot_node() -> None:
    leader, worker = PODS["spot-workers-JobSet-leader"], PODS["spot-workers-JobSet-worker"]
    spot = {"cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"}
    assert spot & {toleration["key"] for toleration in leader.spec["tolerations"]} == set()
    assert spot <= {toleration["key"] for toleration in worker.spec["tolerations"]}
    assert leader.spec["nodeSelector"] != worker.spec["nodeSelector"]
    assert leader.container["image"] == worker.container["image"]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_only_the_runs_own_pods_reach_it(path: Path) -> None:
    """torch unpickles what its rendezvous port receives."""
    (policy,) = [document["spec"] for document in documents(path) if document["kind"] == "NetworkPolicy"]
    labels = policy["podSelector"]["matchLabels"]
    assert policy["policyTypes"] == ["Ingress"]
    members, *others = policy["ingress"]
    assert members == {"from": [{"podSelector": {"matchLabels": labels}}]}
    monitored = any(document["kind"] == "PodMonitor" for document in documents(path))
    assert len(others) == monitored
    for rule in others:
        assert [port["port"] for port in rule["ports"]] == [9400] and "namespaceSelector" in rule["from"][0]
    for template in templates_of(path):
        assert labels.items() <= template["metadata"]["labels"].items()


def templates_of(path: Path) -> list[dict[str, Any]]:
    """Every mapping that has a pod spec."""

    def walk(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            if "containers" in (value.get("spec") or {}):
                yield value
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item)

    return [template for document in documents(path) for template in walk(document)]


def test_monitoring_is_wired() -> None:
    """No manifest passed --metrics-port, and no PodMonitor selected the pods."""
    for name in ("one-node-spot", "several-nodes", "spot-workers"):
        path = SOURCES / "rendered" / f"{name}.yaml"
        (monitor,) = [document["spec"] for document in documents(path) if document["kind"] == "PodMonitor"]
        (rule,) = [document["spec"] for document in documents(path) if document["kind"] == "PrometheusRule"]
        assert rule == yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())
        (port,) = [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
        for template in templates_of(path):
            assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            (container,) = template["spec"]["containers"]
            ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
            assert f"--metrics-port={ports[port]}" in container["args"]
            assert "--set=monitoring.address=0.0.0.0" in container["args"]


def test_nodes_are_admitted_together() -> None:
    (job,) = [item for item in documents(SOURCES / "rendered" / "several-nodes.yaml") if item["kind"] == "JobSet"]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}


def test_consolidation_moves_nobody_but_a_reclaimed_spot_node_is_drained() -> None:
    """Karpenter evicts no pod with its annotation, also from a node that AWS takes away two minutes later."""
    spot = set()
    for path in KUBERNETES:
        for template in templates_of(path):
            annotations = template["metadata"]["annotations"]
            tolerated = {toleration["key"] for toleration in template["spec"]["tolerations"]}
            on_spot = "cloud.google.com/gke-spot" in tolerated
            spot |= {path.stem} if on_spot else set()
            assert annotations.get("karpenter.sh/do-not-disrupt") == ("false" if on_spot else "true"), path
            assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert {"one-node-spot", "spot-workers"} <= spot


def test_registered_memory_may_be_locked() -> None:
    for name, resource in (
        ("several-nodes", "rdma/hca_shared_devices_a"),
        ("several-nodes-efa", "vpc.amazonaws.com/efa"),
    ):
        container = PODS[f"{name}-JobSet-node"].container
        assert container["resources"]["limits"][resource] == container["resources"]["requests"][resource] >= 1
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_volumes_that_fsgroup_does_not_reach_get_their_owner() -> None:
    spec = PODS["several-nodes-efa-JobSet-node"].spec
    (init,) = spec["initContainers"]
    assert init["image"] == spec["containers"][0]["image"]
    assert init["securityContext"]["runAsUser"] == 0 and init["securityContext"]["capabilities"]["add"] == ["CHOWN"]
    folders = {mount["mountPath"] for mount in init["volumeMounts"]}
    assert folders == {"/data", "/cache"} and all(folder in init["command"][-1] for folder in folders)


def test_shared_memory_and_token(pod: Pod) -> None:
    (shm,) = [volume["emptyDir"] for volume in pod.spec["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert pod.environment["HF_TOKEN"]["secretKeyRef"]["optional"] is True
    folder = Path(pod.environment["HF_HOME"])
    assert any(folder.is_relative_to(mount["mountPath"]) for mount in pod.container["volumeMounts"])


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_finished_objects_go_away(path: Path) -> None:
    """Not a PyTorchJob's: with ExitCode, its operator has no completion time of a failed job, and cleans nothing up."""
    for document in documents(path):
        if document["kind"] in ("Job", "JobSet"):
            assert document["spec"]["ttlSecondsAfterFinished"] == 7 * 86400
        if document["kind"] == "PyTorchJob":
            assert document["spec"]["runPolicy"] == {"cleanPodPolicy": "Running"}


def test_the_pods_are_those_of_the_image(pod: Pod) -> None:
    """Not root, and the same user; what is mounted exists; a GPU."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    user, group = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)[-1]
    security = pod.spec["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] == int(user)
    assert security["fsGroup"] == security["runAsGroup"] == int(group)
    assert int(pod.container["resources"]["limits"]["nvidia.com/gpu"]) >= 1
    volumes = {volume["name"] for volume in pod.spec["volumes"]}
    mounts = pod.container["volumeMounts"]
    assert {mount["name"] for mount in mounts} == volumes
    folder = pod.environment.get("OUTPUT_DIR") or next(
        word.removeprefix("--output-dir=") for word in pod.arguments if word.startswith("--output-dir=")
    )
    assert any(Path(folder).is_relative_to(mount["mountPath"]) for mount in mounts), "the run must be on a volume"


CLAIMS = {item["metadata"]["name"]: item["spec"] for path in STORAGE for item in documents(path)}


def test_deleting_a_workload_deletes_no_checkpoint() -> None:
    """Jobs cannot be changed, so delete-and-apply is routine; each manifest had the claim in it."""
    assert sum(len(documents(path)) for path in STORAGE) == len(CLAIMS) == 5
    for path in KUBERNETES:
        assert not any(document["kind"] == "PersistentVolumeClaim" for document in documents(path))
    for spec in CLAIMS.values():
        assert spec["storageClassName"], "the cluster's default may not be what the access mode needs"


def test_every_claim_can_be_made(pod: Pod) -> None:
    volumes = pod.spec["volumes"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert len(claims) >= 2
    for claim in claims:
        assert claim == "aim-runs" or claim.endswith("-shared") == (pod in SEVERAL.values())
        assert CLAIMS[claim]["accessModes"] == [
            "ReadWriteOnce" if pod not in SEVERAL.values() and claim != "aim-runs" else "ReadWriteMany"
        ]


# -- the Helm chart ----------------------------------------------------------------------------------------------------

CHART = DEPLOY / "helm" / "runner"


@pytest.fixture(scope="module")
def helm_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return helm(tmp_path_factory.mktemp("helm"))


def by_kind(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len(items) == len({item["kind"] for item in items})
    return {item["kind"]: item for item in items}


@dataclass(frozen=True)
class Chart:
    program: str

    def run(self, command: str, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        words = [self.program, command, *([name] if command == "template" else []), str(CHART), *options]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    def objects(self, name: str, *options: str) -> dict[str, dict[str, Any]]:
        done = self.run("template", name, *options)
        assert done.returncode == 0, done.stderr
        return by_kind([item for item in yaml.safe_load_all(done.stdout) if item])


@pytest.fixture
def chart(helm_program: str) -> Chart:
    return Chart(helm_program)


@needs("helm")
@pytest.mark.xdist_group("helm")
@pytest.mark.parametrize(("nodes", "overlay"), [(1, "one-node"), (2, "nodes")])
def test_the_chart_gives_what_kustomize_gives(chart: Chart, nodes: int, overlay: str) -> None:
    """Two sources of one pod drift apart."""
    rendered = by_kind(documents(SOURCES / "rendered" / f"{overlay}.yaml"))
    assert chart.objects("train", f"--set=nodes={nodes}") == rendered


@needs("helm")
@pytest.mark.xdist_group("helm")
def test_every_value_of_the_chart_has_its_place(chart: Chart, tmp_path: Path) -> None:
    job = {"model": {"name": "some/model"}, "trainer": {"num_train_epochs": 2}}
    values = {
        "image": "registry.example.com/mine@sha256:0",
        "nodes": 3,
        "gpus": 1,
        "resources": {"cpu": 8, "memory": "64Gi"},
        "job": job,
        "args": ["--set=checkpoint.save_minutes=10"],
        "env": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}],
        "grace": 20,
        "storage": {"data": "a", "cache": "b", "shm": "1Gi"},
        "nodeSelector": {"topology.kubernetes.io/zone": "z"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "queue": "q",
        "backoffLimit": 3,
    }
    assert set(values) | {"config"} == set(yaml.safe_load((CHART / "values.yaml").read_text()))
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    made = chart.objects("mine", "--values", str(tmp_path / "values.yaml"))
    check_pods(made["JobSet"])
    (pod,) = pods_of(made["JobSet"])
    assert pod.job is not None
    assert (pod.job["parallelism"], pod.job["completions"], pod.environment["PET_NNODES"]) == (3, 3, "3")
    assert pod.job["backoffLimitPerIndex"] == 3
    assert made["JobSet"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    assert pod.container["image"] == values["image"]
    assert pod.container["resources"]["requests"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 1}
    assert pod.arguments[-1] == "--set=checkpoint.save_minutes=10" and "--output-dir=/data/mine" in pod.arguments
    assert grace(pod.arguments) + MARGIN_S <= pod.spec["terminationGracePeriodSeconds"] == 50
    assert pod.environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert pod.environment["PET_MASTER_ADDR"] == "mine-node-0-0.mine"
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    assert [volumes[name]["persistentVolumeClaim"]["claimName"] for name in ("data", "cache")] == ["a", "b"]
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "1Gi"
    assert pod.spec["nodeSelector"] == values["nodeSelector"] and pod.spec["tolerations"][-1]["key"] == "spot"
    # The job of one's own is mounted where the command looks for it.
    assert "--config=/etc/runner/job.yaml" in pod.arguments
    assert yaml.safe_load(made["ConfigMap"]["data"]["job.yaml"]) == job
    assert volumes["job"]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
    (labels,) = [item["podSelector"]["matchLabels"] for item in [made["NetworkPolicy"]["spec"]]]
    assert labels["app.kubernetes.io/instance"] == "mine"


@needs("helm")
@pytest.mark.xdist_group("helm")
def test_the_chart_passes_the_linter_and_refuses_a_misspelt_value(chart: Chart) -> None:
    assert chart.run("lint", "", "--strict").returncode == 0
    for wrong in ("gpu=1", "nodes=0", "storage.dat=x"):
        done = chart.run("template", "train", f"--set={wrong}")
        assert done.returncode != 0 and "values don't meet the specifications of the schema" in done.stderr, wrong


# -- docker run --------------------------------------------------------------------------------------------------------


def docker_commands() -> dict[str, list[str]]:
    """The commands of the documents that start a run in the image."""
    pages = [DEPLOY / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for page in pages for line in page.read_text().splitlines() if line.startswith("docker run ")]
    return {line: shlex.split(line, comments=True) for line in lines}


def test_docker_waits_for_the_last_checkpoint_and_has_shared_memory() -> None:
    """`docker stop` killed the run 10 s later, workers had 64 MB of /dev/shm, and /data belonged to root."""
    commands = docker_commands()
    assert commands
    for line, words in commands.items():
        assert any(word.startswith("--shm-size=") or word == "--ipc=host" for word in words), line
        (timeout,) = [int(word.partition("=")[2]) for word in words if word.startswith("--stop-timeout=")]
        assert grace(words) + MARGIN_S <= timeout, line
        options = start.make_context("start", words[words.index("start") + 1 :]).params
        (volume,) = [words[i + 1] for i, word in enumerate(words) if word == "-v"]
        assert Path(str(options["output_dir"])).is_relative_to(volume.partition(":")[2]), line
    assert "install --directory --owner=1000" in (DEPLOY / "README.md").read_text()


# -- the Dockerfile ----------------------------------------------------------------------------------------------------


def test_the_dockerfile_passes_the_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([str(hadolint), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_dependencies_are_a_layer_below_the_code() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(text)) for text in ("RUN python3", "COPY runner")
    ]
    assert order == sorted(order)
    before = [line for line in lines[: order[1]] if line.startswith("COPY")]
    assert before == [
        "COPY pyproject.toml constraints.txt scripts/requirements.py requirements/image.txt ./",
        "COPY README.md LICENSE ./",
    ]


def test_requirements_are_those_of_the_project(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "requirements.py")]

    def ask(*extras: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *extras], cwd=ROOT, capture_output=True, text=True)

    plain, aim = ask().stdout.splitlines(), ask("aim").stdout.splitlines()
    assert any(line.startswith("torch>=") for line in plain) and any(line.startswith("setuptools>=") for line in plain)
    assert not any(line.startswith(("aim", "pytest")) for line in plain)
    assert set(aim) > set(plain) and any(line.startswith("aim>=") for line in aim)
    # An extra that is made of others brings theirs, too.
    sft = " ".join(ask("sft", "s3").stdout.splitlines())
    assert (
        all(f" {name}>=" in sft for name in ("trl", "transformers", "pydantic", "boto3"))
        and "resilient-training[" not in sft
    )
    assert "there is no extra 'aims'; choose from" in ask("aims").stderr
