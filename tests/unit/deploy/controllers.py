"""What restarts a runner, as state machines: rules are read from the files of deploy/, behaviour is from sources.

Sources, by the letter that the code refers to:

[K1] kubernetes/kubernetes pkg/controller/job/job_controller.go and backoff_utils.go: a replacement is delayed by
     10 s x 2^(n-1), at most 10 min; n counts ignored failures, too, and those of one index where limits are by index.
[K2] kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy: rules in order, the first that matches.
[K3] job_controller.go syncJob: a failed index ends the Job where maxFailedIndexes is exceeded, and its pods with it.
[K4] pkg/controller/podgc/gc_controller.go, pkg/controller/tainteviction: the pod of a node that is gone fails, with the
     condition DisruptionTarget, when the Node object is removed; not before, with podReplacementPolicy: Failed.
[J1] kubernetes-sigs/jobset executeFailurePolicy: without a failurePolicy, a failed Job fails the JobSet.
[T1] kubeflow/training-operator pkg/util/train/train_util.go: ExitCode restarts codes from 128, without limit or delay.
[B1] docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html: the first condition that matches; none:
     retry.
[B2] docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html: the main node's end is the job's; the
     loss of another node has no consequence.
[S1] systemd.service(5), systemd.unit(5): RestartPreventExitStatus, RestartForceExitStatus, Restart; StartLimitBurst.
[L1] srun(1): the highest exit code of its tasks, 128 + the signal for one that was killed; sbatch(1) --requeue.
[L2] sbatch(1) and srun(1) --no-kill: a node that fails ends neither the job nor the step.
[D1] dstack 0.22.5 dstack/_internal/core/models/runs.py JobTerminationReason.to_retry_event: any exit code but 0 is an
     `error`, the end of a spot machine an `interruption`; server/.../runs/active.py: `duration` begins with each start.
[P1] SkyPilot 0.14.1 sky/jobs/recovery_strategy.py and sky/backends/task_codegen.py: one node's listed code restarts
     all; the others are ended with the first that fails, and count as 137.
"""

from __future__ import annotations

import configparser
import functools
import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
RENDERED = DEPLOY / "kubernetes" / "rendered"
KILLED = 128 + signal.SIGKILL
# Codes after which a restart ends the same way: they need a human.
FINAL = frozenset({2, 78, 79, 81})


@dataclass
class Start:
    """A node's runner is to be started.

    Attributes:
        delay_s: besides what scheduling takes.
        elsewhere: on another machine.
    """

    node: int
    delay_s: float
    elsewhere: bool = False


@dataclass
class Verdict:
    """What a controller makes of an end.

    Attributes:
        starts: runners to be started.
        outcome: `done`, or why a human is needed; None: it goes on.
        stop: whether the runners that are left are stopped.
        lost: whether those are killed instead.
    """

    starts: list[Start] = field(default_factory=list)
    outcome: str | None = None
    stop: bool = False
    lost: bool = False


@dataclass(frozen=True)
class End:
    """How a node's runner has ended.

    Attributes:
        code: None where the machine is gone, and nobody knows.
        disrupted: Kubernetes' condition DisruptionTarget.
    """

    node: int
    code: int | None
    disrupted: bool = False
    time: float = 0.0


class Controller:
    """Restarts the runners of one run."""

    name: str
    timeout_s: float  # launch.rendezvous_timeout_s

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes

    def ended(self, end: End) -> Verdict:
        raise NotImplementedError


@functools.cache
def read(path: Path) -> str:
    return path.read_text()


@functools.cache
def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(read(path)) if document]


def rendezvous_timeout_s(arguments: list[str]) -> float:
    found = re.findall(r"launch.rendezvous_timeout_s=(\d+)", " ".join(arguments))
    return float(found[-1]) if found else 600.0


def pod_failure_action(rules: list[dict[str, Any]], code: int | None, disrupted: bool) -> str:
    """[K2]; a failure that no rule matches is counted. A pod without an exit code has its condition alone [K4]."""
    for rule in rules:
        if "onExitCodes" in rule:
            on = rule["onExitCodes"]
            if code and (code in on["values"]) == (on["operator"] == "In"):
                return str(rule["action"])
        elif disrupted:
            return str(rule["action"])
    return "Count"


class KubernetesJobs(Controller):
    """A Job, or a JobSet of Jobs; failures are counted by node: by index, or by Job."""

    def __init__(self, num_nodes: int, manifest: str = "one-node", **changes: Any) -> None:
        super().__init__(num_nodes)
        (job,) = [item for item in documents(RENDERED / f"{manifest}.yaml") if item["kind"] in self._KINDS]
        jobs = job["spec"]
        if job["kind"] == "TrainingRuntime":
            jobs = jobs["template"]["spec"]
        specs = [entry["template"]["spec"] for entry in jobs["replicatedJobs"]] if "replicatedJobs" in jobs else [jobs]
        specs = [{**spec, **changes} for spec in specs]
        by_index = [spec for spec in specs if "backoffLimitPerIndex" in spec]
        # A limit of the Job's that is shared by its pods.
        self._shared = not by_index and specs[0].get("parallelism", 1) > 1
        self._limit = by_index[0]["backoffLimitPerIndex"] if by_index else specs[0]["backoffLimit"]
        self._rules = specs[0]["podFailurePolicy"]["rules"]
        assert all(spec["podFailurePolicy"] == specs[0]["podFailurePolicy"] for spec in specs)
        # An index that has failed ends the Job [K3]; a Job that has failed ends the JobSet [J1].
        self._ends_all = not by_index or by_index[0].get("maxFailedIndexes") == 0
        self.timeout_s = rendezvous_timeout_s(specs[0]["template"]["spec"]["containers"][0]["args"])
        self._counted = dict.fromkeys(range(num_nodes), 0)
        self._failures = dict.fromkeys(range(num_nodes), 0)
        self._succeeded: set[int] = set()

    _KINDS = ("Job", "JobSet", "TrainingRuntime")

    def ended(self, end: End) -> Verdict:
        if end.code == 0:
            self._succeeded.add(end.node)
            return Verdict(outcome="done" if len(self._succeeded) == self.num_nodes else None)
        action = pod_failure_action(self._rules, end.code, end.disrupted)
        if action == "FailJob":
            return Verdict(outcome=f"exit code {end.code}", stop=True)
        self._failures[end.node] += 1
        self._counted[end.node] += action == "Count"
        spent = sum(self._counted.values()) if self._shared else self._counted[end.node]
        if spent > self._limit:
            return Verdict(outcome="failures spent", stop=True) if self._ends_all else Verdict()
        failures = sum(self._failures.values()) if self._shared else self._failures[end.node]
        return Verdict([Start(end.node, min(10.0 * 2 ** (failures - 1), 600.0))])  # [K1]

    def decision(self, code: int) -> str:
        actions = [pod_failure_action(self._rules, code, disrupted) for disrupted in (False, True)]
        words = {"FailJob": "fail", "Ignore": "again, free", "Count": "again, counts"}
        if code == 0:
            return "complete"
        if code == KILLED:
            return f"{words[actions[0]]}; free if by a disruption"
        return words[actions[0]]


def kubeflow_code(code: int) -> int:
    """What `kubeflow-start` makes of it."""
    text = read(DEPLOY / "kubernetes" / "kubeflow-start")
    (pattern,) = re.findall(r"^    ([\d| ]+)\) exit \$\(\(code \+ 128\)\)", text, re.MULTILINE)
    return code + 128 if code in {int(word) for word in pattern.split("|")} else code


class PyTorchJob(Controller):
    """Kubeflow's v1 operator: the master's success is the job's; workers that run then are removed (cleanPodPolicy).

    `kubeflow-start` tries some codes again in the pod, which the operator does not see.
    """

    def __init__(self, num_nodes: int, manifest: str = "pytorchjob") -> None:
        super().__init__(num_nodes)
        (job,) = [item for item in documents(RENDERED / f"{manifest}.yaml") if item["kind"] == "PyTorchJob"]
        assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
        self.timeout_s = rendezvous_timeout_s(container["args"])
        text = read(DEPLOY / "kubernetes" / "kubeflow-start")
        (again,) = re.findall(r"^    ([\d| ]+)\) failures=", text, re.MULTILINE)
        (limit,) = re.findall(r"MAX_FAILURES:-(\d+)", text)
        self._again, self._limit = {int(word) for word in again.split("|")}, int(limit)
        self._failures = dict.fromkeys(range(num_nodes), 0)

    def ended(self, end: End) -> Verdict:
        if end.code == 0:
            return Verdict(outcome="done" if end.node == 0 else None, stop=end.node == 0)
        if end.code in self._again and self._failures[end.node] < self._limit:
            self._failures[end.node] += 1
            return Verdict([Start(end.node, min(10.0 * 2 ** (self._failures[end.node] - 1), 600.0))])
        # A pod that was collected has no code, which counts as one that is restarted.
        code = kubeflow_code(end.code) if end.code is not None else 255
        if code < 128:  # [T1]
            return Verdict(outcome="failures spent" if end.code in self._again else f"exit code {end.code}", stop=True)
        self._failures[end.node] = 0
        return Verdict([Start(end.node, 0.0)])

    def decision(self, code: int) -> str:
        if code in self._again:
            return "again, counts"
        code = kubeflow_code(code)
        return "complete" if code == 0 else "again" if code >= 128 else "fail"


class Whole(Controller):
    """Those that restart a run as a whole, once all its nodes have ended."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        self._codes: dict[int, int] = {}

    def ended(self, end: End) -> Verdict:
        if end.code is None:
            # The machine: all others are ended with it.
            self._codes.clear()
            return self._machine_lost(end)
        self._codes[end.node] = end.code
        if len(self._codes) < self.num_nodes:
            return self._one_ended(end)
        codes, self._codes = self._codes, {}
        return self._all_ended(codes, end.time)

    def _one_ended(self, end: End) -> Verdict:
        return Verdict()

    def _machine_lost(self, end: End) -> Verdict:
        return Verdict(self._all_again(60.0, elsewhere=True), lost=True)

    def _all_ended(self, codes: dict[int, int], time: float) -> Verdict:
        raise NotImplementedError

    def _all_again(self, delay_s: float, elsewhere: bool = False) -> list[Start]:
        return [Start(node, delay_s, elsewhere) for node in range(self.num_nodes)]


class Slurm(Whole):
    """train.sbatch in one job of all nodes; a node that fails puts it back into the queue."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        text = read(DEPLOY / "slurm" / "train.sbatch")
        (final,) = re.findall(r'^  ([\d| ]+)\) exit "\$ended"', text, re.MULTILINE)
        self._final = {int(word) for word in final.split("|")}
        (limit,) = re.findall(r"MAX_FAILURES:-(\d+)", text)
        self._limit = int(limit)
        self._free = {int(code) for code in re.findall(r'if \[ "\$ended" != (\d+) \]', text)}
        self._new_job = {int(code) for code in re.findall(r'if \[ "\$ended" = (\d+) \]', text)}
        self.timeout_s = rendezvous_timeout_s([text])
        self._failures = 0

    def _all_ended(self, codes: dict[int, int], time: float) -> Verdict:
        code = max(codes.values())  # [L1]
        if code in self._final:
            return Verdict(outcome="done" if code == 0 else f"exit code {code}")
        self._failures += code not in self._free
        if self._failures > self._limit:
            return Verdict(outcome="failures spent")
        return Verdict(self._all_again(120.0, elsewhere=code in self._new_job))

    def decision(self, code: int) -> str:
        if code == 0:
            return "complete"
        if code in self._final:
            return "fail"
        if code in self._new_job:
            return "again without the node, counts"
        return "again, free" if code in self._free else "again, counts"


class ElasticSlurm(Slurm):
    """train.sbatch with MIN_NODES and --no-kill: a lost node ends neither the job nor its step [L2]."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        text = read(DEPLOY / "slurm" / "train.sbatch")
        assert "${elastic:+--no-kill}" in text and '"state": "finished"' in text

    def _machine_lost(self, end: End) -> Verdict:
        self._codes[end.node] = KILLED
        if len(self._codes) < self.num_nodes:
            return Verdict()
        codes, self._codes = self._codes, {}
        return self._all_ended(codes, end.time)

    def ended(self, end: End) -> Verdict:
        return self._machine_lost(end) if end.code is None else super().ended(end)

    def _all_ended(self, codes: dict[int, int], time: float) -> Verdict:
        return Verdict(outcome="done") if 0 in codes.values() else super()._all_ended(codes, time)


class Batch(Whole):
    """AWS Batch; the rule that submits a job again when its attempts are spent."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        folder = DEPLOY / "aws-batch"
        definition = json.loads(read(folder / "job-definition.json"))
        pattern = json.loads(read(folder / "resubmit-pattern.json"))
        if num_nodes > 1:
            definition = json.loads(read(folder / "multi-node-job-definition.json"))
            container = definition["nodeProperties"]["nodeRangeProperties"][0]["container"]
        else:
            container = definition["containerProperties"]
        self.timeout_s = rendezvous_timeout_s(container["command"])
        self._strategy = definition["retryStrategy"]
        exited, gone = pattern["detail"]["$or"]
        self._again, self._gone = set(exited["container"]["exitCode"]), gone["statusReason"][0]["prefix"]
        (times,) = re.findall(r"times=\$\{3:-(\d+)\}", read(folder / "resubmit-rules"))
        self._attempts, self._submissions_left = 1, int(times)

    def action(self, code: int, reason: str = "Essential container in task exited") -> str:
        """[B1]"""

        def matches(pattern: str, text: str) -> bool:
            return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern

        for condition in self._strategy["evaluateOnExit"]:
            if matches(condition.get("onExitCode", "*"), str(code)) and matches(
                condition.get("onStatusReason", "*"), reason
            ):
                return str(condition["action"]).upper()
        return "RETRY"

    def _one_ended(self, end: End) -> Verdict:
        # [B2]
        if end.node != 0:
            return Verdict()
        codes, self._codes = {0: end.code or 0}, {}
        verdict = self._all_ended(codes, end.time)
        verdict.lost = True
        return verdict

    def _all_ended(self, codes: dict[int, int], time: float) -> Verdict:
        return self._next(codes[0], "Essential container in task exited")

    def _machine_lost(self, end: End) -> Verdict:
        if end.node != 0:
            self._codes[end.node] = KILLED
            return Verdict()  # [B2]
        verdict = self._next(KILLED, "Host EC2 (instance i-0abc) terminated.")
        verdict.lost = True
        return verdict

    def _next(self, code: int, reason: str) -> Verdict:
        if code == 0:
            return Verdict(outcome="done")
        if self.action(code, reason) == "EXIT":
            return Verdict(outcome=f"exit code {code}")
        if self._attempts >= self._strategy["attempts"]:
            again = code in self._again or reason.startswith(self._gone)
            if not again or not self._submissions_left:
                return Verdict(outcome="failures spent")
            self._attempts = 0
            self._submissions_left -= 1
        self._attempts += 1
        return Verdict(self._all_again(60.0, elsewhere=True))

    def decision(self, code: int) -> str:
        return "succeeded" if code == 0 else {"RETRY": "again", "EXIT": "fail"}[self.action(code)]


def unit() -> configparser.ConfigParser:
    """runner.service."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(read(DEPLOY / "spot" / "runner.service").replace("\\\n", " "))
    return parser


class Systemd(Controller):
    """A unit on a VM, in a group that makes another VM."""

    timeout_s = 600.0

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        parser = unit()
        self._service, self._unit = parser["Service"], parser["Unit"]
        assert self._unit["StartLimitIntervalSec"] == "1h" and self._unit["StartLimitAction"] == "poweroff"
        text = read(DEPLOY / "spot" / "runner-ended")
        (final,) = re.findall(r"^  ([\d| ]+)\) # The run is over", text, re.MULTILINE)
        (bad,) = re.findall(r"^  (\d+)\) ;; # Bad node", text, re.MULTILINE)
        self._final, self._bad = {int(word) for word in final.split("|")}, int(bad)
        self._starts: list[float] = []

    def restarts(self, code: int) -> bool:
        """[S1]; above 128, a signal's end."""
        if str(code) in self._service["RestartPreventExitStatus"].split():
            return False
        if str(code) in self._service["RestartForceExitStatus"].split():
            return True
        assert self._service["Restart"] == "on-failure"
        return code not in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP, 128 + signal.SIGPIPE)

    def ended(self, end: End) -> Verdict:
        if end.code in self._final:
            return Verdict(outcome="done" if end.code == 0 else f"exit code {end.code}")
        new_vm = end.code is None or end.code == self._bad
        if not new_vm:
            assert end.code is not None and self.restarts(end.code)
            self._starts = [*(at for at in self._starts if at > end.time - 3600), end.time]
            new_vm = len(self._starts) >= int(self._unit["StartLimitBurst"])
        if new_vm:
            self._starts = []
            return Verdict([Start(end.node, 240.0, elsewhere=True)])
        return Verdict([Start(end.node, float(self._service["RestartSec"]))])

    def decision(self, code: int) -> str:
        if code in self._final:
            assert not self.restarts(code)
            return "group to 0, VM off"
        return "VM off" if code == self._bad else "again"


class SkyPilot(Whole):
    """A managed job: the first node that fails ends the others; new machines each time."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        (job,) = documents(DEPLOY / "skypilot" / "train.yaml")
        recovery = job["resources"]["job_recovery"]
        assert recovery["strategy"] == "EAGER_NEXT_REGION" and recovery["max_restarts_on_errors"] == 0
        self._again = set(recovery["recover_on_exit_codes"])
        # A killed runner's code is given another form, as 137 is that of the nodes that were ended with it [P1].
        (self._killed,) = [int(code) for code in re.findall(r'"\$code" = 137 \]; then code=(\d+)', job["run"])]
        self.timeout_s = rendezvous_timeout_s([job["run"]])

    def said(self, code: int) -> int:
        return self._killed if code == KILLED else code

    def _one_ended(self, end: End) -> Verdict:
        if end.code == 0:
            return Verdict()
        codes, self._codes = {**self._codes}, {}
        verdict = self._all_ended(codes, end.time)
        verdict.lost = True
        return verdict

    def _all_ended(self, codes: dict[int, int], time: float) -> Verdict:
        said = {self.said(code) for code in codes.values()}
        if said == {0}:
            return Verdict(outcome="done")
        if said & self._again:
            return Verdict(self._all_again(120.0, elsewhere=True))
        return Verdict(outcome=f"exit code {max(said)}")

    def decision(self, code: int) -> str:
        if code == 0:
            return "complete"
        return "again" if self.said(code) in self._again else "fail"


class Dstack:
    """A task: its command starts the runner again, and dstack [D1] all nodes when a spot machine is gone."""

    def __init__(self) -> None:
        (task,) = documents(DEPLOY / "dstack" / "train.dstack.yml")
        # With `error`, 78 would be tried for ever.
        assert set(task["retry"]["on_events"]) == {"no-capacity", "interruption"} and task["spot_policy"] == "spot"
        (script,) = task["commands"]
        cases = re.findall(r"^\s+([\d| ]+)\) .*;;", script, re.MULTILINE)
        again, counted = ({int(word) for word in case.split("|")} for case in cases)
        self._again, self._counted = again, counted

    def decision(self, code: int) -> str:
        if code == 0:
            return "complete"
        return "again" if code in self._again else "again, counts" if code in self._counted else "fail"


PLATFORMS: dict[str, Callable[[], Any]] = {
    "Job": lambda: KubernetesJobs(1, "one-node"),
    "Job, spot": lambda: KubernetesJobs(1, "one-node-spot"),
    "JobSet": lambda: KubernetesJobs(2, "several-nodes"),
    "JobSet, spot workers": lambda: KubernetesJobs(4, "spot-workers"),
    "Trainer 2": lambda: KubernetesJobs(2, "trainjob"),
    "PyTorchJob": lambda: PyTorchJob(1, "pytorchjob"),
    "PyTorchJob, nodes": lambda: PyTorchJob(2, "pytorchjob-nodes"),
    "Slurm": lambda: Slurm(1),
    "Slurm, nodes": lambda: Slurm(3),
    "Slurm, elastic": lambda: ElasticSlurm(3),
    "AWS Batch": lambda: Batch(1),
    "AWS Batch, nodes": lambda: Batch(2),
    "systemd": lambda: Systemd(1),
    "SkyPilot": lambda: SkyPilot(2),
}
# By the columns of the table in deploy/README.md.
COLUMNS: dict[str, Callable[[], Any]] = {
    "Job, JobSet, Trainer 2": PLATFORMS["Job"],
    "PyTorchJob": PLATFORMS["PyTorchJob"],
    "AWS Batch": PLATFORMS["AWS Batch"],
    "systemd": PLATFORMS["systemd"],
    "SkyPilot": PLATFORMS["SkyPilot"],
    "dstack": Dstack,
    "Slurm": PLATFORMS["Slurm"],
}
