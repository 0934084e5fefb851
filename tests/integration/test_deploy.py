"""What lies under deploy/, against real schemas; the exit codes against what each scheduler documents.

The expected decisions are those of the table in deploy/README.md: what a user reads there is what the files do.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
import kubernetes_validate
import pytest
import yaml
from botocore.validate import ParamValidator

from runner.cli import start
from runner.config import load_config, parse_setting
from runner.errors import ExitCode

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SHARED = ROOT.parent / "shared" / "infra"
KUBERNETES_VERSION = "1.34"
KUBEFLOW_START = DEPLOY / "kubernetes" / "kubeflow-start"
UNIT = DEPLOY / "spot" / "runner.service"
# SIGKILL and SIGTERM that were not handled; both come from outside.
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
# AWS Batch kills so long after its SIGTERM.
BATCH_STOP_S = 30
# What a supervisor may need between the end of its ranks and its own.
MARGIN_S = 5


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def job_definition() -> dict[str, Any]:
    definition: dict[str, Any] = json.loads((DEPLOY / "aws-batch" / "job-definition.json").read_text())
    return definition


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text().replace("\\\n", " "))
    return parser


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
    f"{path.name}-{pod.name}": pod for path in KUBERNETES for document in documents(path) for pod in pods_of(document)
}
JOBS = {name: pod.job for name, pod in PODS.items() if pod.job is not None}


@pytest.fixture(params=PODS)
def pod(request: pytest.FixtureRequest) -> Pod:
    return PODS[request.param]


def test_every_way_of_kubernetes_is_here() -> None:
    assert [path.name for path in KUBERNETES] == [
        "job.yaml",
        "jobset.yaml",
        "pytorchjob-distributed.yaml",
        "pytorchjob.yaml",
        "trainjob.yaml",
    ]
    assert len(PODS) == 6 and len(JOBS) == 3


# -- schemas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_own_objects_are_valid(path: Path) -> None:
    for document in documents(path):
        if "." not in document["apiVersion"]:
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        for pod in pods_of(document):
            # The schema of a custom object does not look into the templates; those of Kubernetes do.
            if pod.job is not None:
                wrapped = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": pod.job}
            else:
                wrapped = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
            kubernetes_validate.validate(wrapped, KUBERNETES_VERSION, strict=True)


def test_the_schemas_find_a_misspelt_field() -> None:
    (job,) = [document for document in documents(DEPLOY / "kubernetes" / "job.yaml") if document["kind"] == "Job"]
    job["spec"]["podFailurPolicy"] = job["spec"].pop("podFailurePolicy")
    with pytest.raises(kubernetes_validate.ValidationError, match="podFailurPolicy"):
        kubernetes_validate.validate(job, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize(
    ("manifest", "kind", "crd"),
    [
        ("pytorchjob.yaml", "PyTorchJob", "pytorchjobs.yaml"),
        ("pytorchjob-distributed.yaml", "PyTorchJob", "pytorchjobs.yaml"),
        ("trainjob.yaml", "TrainJob", "trainjobs.yaml"),
    ],
)
def test_kubeflow_objects_are_valid(manifest: str, kind: str, crd: str, tmp_path: Path) -> None:
    checker, definition = SHARED / "crdcheck.py", SHARED / "crd" / crd
    if not checker.is_file() or not definition.is_file():
        pytest.skip(f"no published CRD here ({definition})")
    (document,) = [item for item in documents(DEPLOY / "kubernetes" / manifest) if item["kind"] == kind]

    def check(content: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / manifest).write_text(yaml.safe_dump(content))
        command = [sys.executable, str(checker), str(definition), str(tmp_path / manifest)]
        return subprocess.run(command, capture_output=True, text=True)

    result = check(document)
    assert result.returncode == 0, result.stdout + result.stderr
    document["spec"]["unheardOf"] = 1
    assert "unheardOf" in check(document).stdout


def test_the_job_definition_is_what_the_aws_api_takes() -> None:
    definition = job_definition()
    operation = botocore.session.get_session().get_service_model("batch").operation_model("RegisterJobDefinition")
    report = ParamValidator().validate(definition, operation.input_shape)
    assert not report.has_errors(), report.generate_report()
    # What the reference of the API says beside its model.
    strategy = definition["retryStrategy"]
    assert 1 <= strategy["attempts"] <= 10 and len(strategy["evaluateOnExit"]) <= 5
    for condition in strategy["evaluateOnExit"]:
        assert re.fullmatch(r"\d+\*?", condition.get("onExitCode", "0"))
        assert re.fullmatch(r"[\w.:\s]+\*?", condition.get("onStatusReason", "x"))


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here (apt-get install systemd)")
    # The unit is not installed here; it names a program that is.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/venv/bin/runner", "/bin/true"))
    result = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr.strip(), result.stderr


def test_user_data_installs_this_unit_and_a_valid_job(tmp_path: Path) -> None:
    text = (DEPLOY / "spot" / "user-data.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    files = {entry["path"]: entry["content"] for entry in yaml.safe_load(text)["write_files"]}
    assert files["/etc/systemd/system/runner.service"] == UNIT.read_text()
    (tmp_path / "job.yaml").write_text(files["/etc/runner/job.yaml"])
    load_config(str(tmp_path / "job.yaml"), {})
    variables = set(re.findall(r"\$\{(\w+)}", unit()["Service"]["ExecStart"]))
    assert variables == {"CLOUD", "CHECKPOINTS"}
    assert variables <= {line.partition("=")[0] for line in files["/etc/runner/environment"].splitlines()}


# -- exit codes --------------------------------------------------------------------------------------------------------


def pod_failure_action(rules: list[dict[str, Any]], container: str, code: int, disrupted: bool = False) -> str:
    """By https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy: rules in order, the first
    that matches; a failure that none matches is counted."""
    for rule in rules:
        if "onExitCodes" in rule:
            on = rule["onExitCodes"]
            assert on.get("containerName", container) == container
            assert 0 not in on["values"] and on["values"] == sorted(set(on["values"]))
            if code != 0 and (code in on["values"]) == (on["operator"] == "In"):
                return str(rule["action"])
        else:
            conditions = [(condition["type"], condition["status"]) for condition in rule["onPodConditions"]]
            if disrupted and ("DisruptionTarget", "True") in conditions:
                return str(rule["action"])
    return "Count"


def batch_action(conditions: list[dict[str, str]], code: int, status_reason: str = "Essential container exited") -> str:
    """By https://docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html: all that a condition names must
    match, an asterisk may end a pattern; what no condition matches is retried."""

    def matches(pattern: str, text: str) -> bool:
        return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern

    for condition in conditions:
        patterns = {key: value for key, value in condition.items() if key != "action"}
        assert patterns and set(patterns) <= {"onExitCode", "onStatusReason"}
        if matches(patterns.get("onExitCode", "*"), str(code)) and matches(
            patterns.get("onStatusReason", "*"), status_reason
        ):
            return condition["action"].upper()
    return "RETRY"


def systemd_restarts(service: configparser.SectionProxy, code: int) -> bool:
    """By systemd.service(5): prevented, forced, or else what Restart=on-failure says; above 128, a signal's end."""
    if str(code) in service["RestartPreventExitStatus"].split():
        return False
    if str(code) in service["RestartForceExitStatus"].split():
        return True
    assert service["Restart"] == "on-failure"
    return code not in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP, 128 + signal.SIGPIPE)


def documented() -> dict[int, dict[str, str]]:
    """The table of deploy/README.md: exit code → scheduler → decision."""
    lines = (DEPLOY / "README.md").read_text().splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("| code |"))
    names = [cell.strip() for cell in lines[header].strip("|").split("|")]
    table = {}
    for line in lines[header + 2 :]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            break
        table[int(re.match(r"\d+", cells[0])[0])] = dict(zip(names, cells, strict=True))  # type: ignore[index]
    return table


def test_every_exit_code_is_documented() -> None:
    assert set(documented()) == {int(code) for code in ExitCode} | {137}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("code", [*ExitCode, *KILLED])
def test_jobs_decide_as_documented(name: str, code: int) -> None:
    rules = JOBS[name]["podFailurePolicy"]["rules"]
    container = PODS[name].container["name"]
    alone = pod_failure_action(rules, container, code)
    disrupted = pod_failure_action(rules, container, code, disrupted=True)
    expected = documented().get(code, documented()[137])["Job, JobSet, Trainer 2"]
    said = {"FailJob": "fail", "Ignore": "again, free", "Count": "again, counts"}
    if code != 0:
        assert expected.startswith(said[alone])
        # A drained node takes nothing off the budget, but does not revive what would fail again.
        assert disrupted == ("FailJob" if alone == "FailJob" else "Ignore")
    else:
        assert expected == "complete"


@pytest.mark.parametrize("name", JOBS)
def test_jobs_may_have_a_failure_policy(name: str) -> None:
    """The API server refuses it with another restartPolicy; a second pod beside the first would be fenced."""
    assert PODS[name].spec["restartPolicy"] == "Never"
    assert JOBS[name]["podReplacementPolicy"] == "Failed"
    assert JOBS[name]["backoffLimit"] > 0


@pytest.mark.parametrize("code", [*ExitCode, *KILLED])
def test_batch_decides_as_documented(code: int) -> None:
    conditions = job_definition()["retryStrategy"]["evaluateOnExit"]
    expected = documented().get(code, documented()[137])["AWS Batch"]
    if code != 0:
        assert expected == {"RETRY": "again", "EXIT": "fail"}[batch_action(conditions, code)]
    else:
        assert expected == "succeeded"
    # A spot machine that was taken away.
    assert batch_action(conditions, 137, "Host EC2 (instance i-0abc) terminated.") == "RETRY"


@pytest.mark.parametrize("code", [*ExitCode, KILLED[0]])
def test_systemd_decides_as_documented(code: int) -> None:
    expected = documented()[code]["systemd"]
    assert systemd_restarts(unit()["Service"], code) == (expected == "again")


@pytest.mark.parametrize("code", ExitCode)
def test_a_bad_machine_powers_itself_off(code: int, tmp_path: Path) -> None:
    said = tmp_path / "said"
    program(tmp_path / "systemctl", f'echo "$@" >{shlex.quote(str(said))}')
    # systemd's own escapes: + is for root, $$ is a dollar.
    command = shlex.split(unit()["Service"]["ExecStopPost"].removeprefix("+").replace("$$", "$"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "EXIT_STATUS": str(int(code))}
    subprocess.run(command, check=True, env=environment)
    assert said.exists() == (documented()[code]["systemd"] == "powers the VM off")
    assert not said.exists() or said.read_text().split()[-1] == "poweroff"


SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("code", [*ExitCode, KILLED[0]])
def test_kubeflow_start_decides_as_documented(shell: str, code: int, tmp_path: Path) -> None:
    ending = f"exit {int(code)}" if code < 128 else "kill -KILL $$"
    program(tmp_path / "runner", f'[ "$*" = "start --grace=90 two words" ] || exit 99\n{ending}')
    result = kubeflow_start(shell, tmp_path, "--grace=90", "two words")
    result.wait(30)
    # restartPolicy ExitCode: https://www.kubeflow.org/docs/components/trainer/legacy-v1
    decision = "complete" if result.returncode == 0 else "again" if result.returncode >= 128 else "fail"
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


def kubeflow_start(shell: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
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
    # SIGTERM to all would reach the ranks beside the supervisor.
    assert service["KillMode"] == "mixed"


COMMANDS = {
    **{name: pod.arguments for name, pod in PODS.items()},
    "aws-batch": ["runner", *job_definition()["containerProperties"]["command"]],
    "systemd": shlex.split(unit()["Service"]["ExecStart"].replace("${CHECKPOINTS}", "s3://b/r")),
}


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("name", COMMANDS)
def test_runner_understands_the_command(name: str, cloud: str) -> None:
    program, *arguments = (word.replace("${CLOUD}", cloud) for word in COMMANDS[name])
    if program != "kubeflow-start":
        assert Path(program).name == "runner" and arguments.pop(0) == "start"
    options = start.make_context("start", arguments).params
    assert options["script"] is None
    path = (options["config_path"] or "").replace("/opt/runner/configs", str(DEPLOY / "configs"))
    if path == "/etc/runner/job.yaml":
        path = ""  # test_user_data_installs_this_unit_and_a_valid_job
    load_config(path or None, {}, [parse_setting(text) for text in options["settings"]])


def test_several_machines_find_each_other() -> None:
    """The port after the rendezvous port is the runners' own (launch.peer_port)."""
    jobset = PODS["jobset.yaml-JobSet-node"]
    trainer = PODS["trainjob.yaml-TrainingRuntime-node"]
    kubeflow = [pod for name, pod in PODS.items() if name.startswith("pytorchjob-distributed")]
    assert len(kubeflow) == 2
    for pod in (jobset, trainer, *kubeflow):
        first, second = (port["containerPort"] for port in pod.container["ports"])
        assert second == first + 1
        assert pod.environment["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert "--local-addr=$(POD_IP)" in pod.arguments
    (document,) = [item for item in documents(DEPLOY / "kubernetes" / "jobset.yaml") if item["kind"] == "JobSet"]
    name = document["metadata"]["name"]
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and document["spec"]["network"]["enableDNSHostnames"]
    assert jobset.environment["PET_MASTER_ADDR"] == f"{name}-node-0-0.{name}"
    assert jobset.environment["PET_MASTER_PORT"] == str(jobset.container["ports"][0]["containerPort"])
    assert jobset.job is not None and jobset.job["completionMode"] == "Indexed"
    assert jobset.environment["PET_NNODES"] == str(jobset.job["completions"]) == str(jobset.job["parallelism"])
    # By this name the operator knows the rendezvous port; by this name of the container, the container.
    assert {pod.container["ports"][0]["name"] for pod in kubeflow} == {"pytorchjob-port"}
    assert {pod.container["name"] for name, pod in PODS.items() if "PyTorchJob" in name} == {"pytorch"}


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


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_every_claim_comes_with_its_manifest(path: Path) -> None:
    items = documents(path)
    made = {item["metadata"]["name"]: item["spec"] for item in items if item["kind"] == "PersistentVolumeClaim"}
    pods = [pod for item in items for pod in pods_of(item)]
    volumes = [volume for pod in pods for volume in pod.spec["volumes"]]
    claimed = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}
    assert claimed == set(made)
    several = path.name in ("jobset.yaml", "trainjob.yaml", "pytorchjob-distributed.yaml")
    assert not several or all(spec["accessModes"] == ["ReadWriteMany"] for spec in made.values())


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
    assert before == ["COPY pyproject.toml constraints.txt scripts/requirements.py ./", "COPY README.md LICENSE ./"]


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
    assert all(f" {name}>=" in sft for name in ("trl", "transformers", "pydantic", "boto3")) and "[" not in sft
    assert "there is no extra 'aims'; choose from" in ask("aims").stderr
