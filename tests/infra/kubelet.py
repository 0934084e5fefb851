"""Runs the pods of a manifest as processes of this machine, as a kubelet and a container runtime would.

Each pod has its own network, mount, PID, host-name and IPC namespaces. Its root holds what the image would (the
system's programs, this repository's environment, an empty home) and what the manifest mounts. The first process is the
container's, with its user, groups, environment, and the capabilities that are asked for. A field of a pod that is not
known here is an error, so that no manifest rests on something that nothing has tried.

Not done: seccomp profiles, limits of memory and processors, GPUs and other devices, and what concerns the scheduler.
Addresses are those of `runner.chaos.network`.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from runner.chaos.network import address_of, inside

ROOT = Path(__file__).parents[2]
_DOCKERFILE = (ROOT / "Dockerfile").read_text()
_POD_FIELDS = {
    "automountServiceAccountToken",
    "containers",
    "enableServiceLinks",
    "initContainers",
    "nodeSelector",
    "restartPolicy",
    "securityContext",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
}
_CONTAINER_FIELDS = {
    "args",
    "command",
    "env",
    "image",
    "name",
    "ports",
    "resources",
    "securityContext",
    "terminationMessagePolicy",
    "volumeMounts",
}
# What a real one adds, although enableServiceLinks is off.
_OF_KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def _from_dockerfile(instruction: str) -> str:
    found = re.findall(rf"^{instruction} (.*)$", _DOCKERFILE, re.MULTILINE)
    return str(found[-1])


@dataclass
class Pod:
    """A pod as an operator makes it.

    Attributes:
        name: Also its host name.
        node: Place among the run's pods, and the number of its network namespace.
        spec: The `spec` of the manifest's template.
        metadata: Its labels and annotations.
        environment: Variables that the operator adds.
        aliases: Names under which others find it.
    """

    name: str
    node: int
    spec: dict[str, Any]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    environment: list[dict[str, Any]] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def address(self) -> str:
        return address_of(self.node)

    def variables(self) -> dict[str, str]:
        """The container's environment; a secret that is optional and absent gives none."""
        found: dict[str, str] = {}
        for entry in [*self.container.get("env", []), *self.environment]:
            value = entry.get("value")
            if value is None and "valueFrom" in entry:
                value = self._reference(entry["valueFrom"])
            if value is not None:
                found[entry["name"]] = _expand(value, found)
        return found

    def _reference(self, source: Mapping[str, Any]) -> str | None:
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["optional"], "no secret exists here"
            return None
        path = source["fieldRef"]["fieldPath"]
        plain = {"status.podIP": self.address, "spec.nodeName": f"machine-{self.node}", "metadata.name": self.name}
        if path in plain:
            return plain[path]
        kind, key = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path).groups()  # type: ignore[union-attr]
        return self.metadata[kind][key]

    def command(self) -> list[str]:
        entrypoint = [word.strip('" ') for word in _from_dockerfile("ENTRYPOINT").strip("[]").split(",")]
        words = [*self.container.get("command", entrypoint), *self.container.get("args", [])]
        variables = self.variables()
        return [_expand(word, variables) for word in words]


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does: a variable that does not exist stays as it is written."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


class Kubelet:
    """Starts pods on one machine; the volumes of a claim are shared by its pods and outlive them."""

    def __init__(self, folder: Path, pods: list[Pod], config: str) -> None:
        """Prepare.

        Args:
            folder: For volumes, roots and logs.
            pods: All pods of the run, which find each other by name.
            config: What the image has as the configuration that the manifests name.
        """
        self._folder, self._pods, self._config = folder, pods, config
        self._hosts = "127.0.0.1 localhost\n" + "".join(
            f"{pod.address} {' '.join([pod.name, *pod.aliases])}\n" for pod in pods
        )
        self._starts = 0
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.logs: dict[str, list[Path]] = {pod.name: [] for pod in pods}

    def claim(self, name: str) -> Path:
        """The folder of a persistent volume's claim."""
        return self._folder / "claims" / name

    def start(self, pod: Pod) -> None:
        _check_known(pod)
        self._starts += 1
        stage = self._folder / f"pod-{self._starts}"
        stage.mkdir(parents=True)
        script = "\n".join(["set -e", *self._make_root(pod, stage), *self._enter(pod, stage)])
        log = stage / "log"
        self.logs[pod.name].append(log)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--uts", "--ipc"]
        with log.open("wb") as output:
            self.running[pod.name] = subprocess.Popen(
                inside(pod.node, [*namespaces, "sh", "-c", script]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, pod: Pod, timeout_s: float | None = None) -> int:
        """The container's exit code, as Kubernetes reports it."""
        code = self.running[pod.name].wait(timeout_s)
        del self.running[pod.name]
        return code if code >= 0 else 128 - code

    def delete(self, pod: Pod) -> int:
        """End a pod as an eviction does: SIGTERM to its first process, SIGKILL after the grace period."""
        process = self.running[pod.name]
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        try:
            return self.wait(pod, pod.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            first.kill()
            self.wait(pod)
            return 137

    def end(self) -> None:
        """Kill what still runs; the namespaces, and all mounts in them, go with it."""
        for process in self.running.values():
            process.kill()
            process.wait()

    def output(self, pod: Pod) -> str:
        """What all containers of a pod's name have printed."""
        return "\n----\n".join(path.read_text(errors="replace") for path in self.logs[pod.name])

    def _make_root(self, pod: Pod, stage: Path) -> Iterator[str]:
        """Shell commands that make the container's root; they run in its mount namespace, as root."""
        root = stage / "root"
        yield "mount --make-rprivate /"
        yield from _tmpfs(root, "mode=755")
        for name in ("bin", "lib", "lib64", "sbin"):
            path = Path("/", name)
            if path.is_symlink():
                yield f"ln -s {path.readlink()} {root / name}"
            elif path.exists():
                yield from _bind(path, root / name)
        yield from _bind(Path("/usr"), root / "usr")
        # Where Python and this repository are, under their own paths.
        for path in dict.fromkeys([Path(sys.base_prefix), Path(sys.prefix), ROOT]):
            if not path.is_relative_to("/usr"):
                yield from _bind(path, root / path.relative_to("/"))
        yield f"mkdir -p {root}/etc {root}/proc {root}/sys {root}/opt/venv/bin {root}/opt/runner/configs"
        yield f"mount -t proc proc {root}/proc"
        yield f"mount --rbind /sys {root}/sys"
        for name in ("ld.so.cache", "alternatives", "ssl", "nsswitch.conf"):
            if Path("/etc", name).exists():
                yield f"cp -a /etc/{name} {root}/etc/"
        user = "runner:x:1000:1000::/home/runner:/bin/sh"
        yield f"printf '%s\\n' root:x:0:0::/root:/bin/sh {user} > {root}/etc/passwd"
        yield f"printf '%s\\n' root:x:0: runner:x:1000: > {root}/etc/group"
        yield f"printf %s {shlex.quote(self._hosts)} > {root}/etc/hosts"
        yield f"printf %s {shlex.quote(self._config)} > {root}/opt/runner/configs/smollm3-3b.yaml"
        yield f"cp {ROOT}/deploy/kubernetes/kubeflow-start {root}/opt/venv/bin/"
        yield f"ln -s {Path(sys.executable).with_name('runner')} {root}/opt/venv/bin/runner"
        workdir = _from_dockerfile("WORKDIR")
        yield f"install -d -o 1000 -g 1000 {root}{workdir} {root}/home/runner"
        yield f"install -d -m 1777 {root}/tmp {root}/var/tmp"
        yield from _devices(root)
        for mount in pod.container.get("volumeMounts", []):
            yield from self._mount(pod, mount, root)

    def _mount(self, pod: Pod, mount: Mapping[str, Any], root: Path) -> Iterator[str]:
        assert set(mount) <= {"name", "mountPath"}
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
        target = root / mount["mountPath"].lstrip("/")
        if "emptyDir" in volume:
            assert volume["emptyDir"]["medium"] == "Memory"
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            yield from _tmpfs(target, f"mode=1777,size={size}")
            return
        folder = self.claim(volume["persistentVolumeClaim"]["claimName"])
        folder.mkdir(parents=True, exist_ok=True)
        if "initContainers" not in pod.spec:
            # What fsGroup has the kubelet do, on volumes that support it; an overlay with a container for that rests on
            # none that do.
            group = pod.spec["securityContext"]["fsGroup"]
            yield f"chgrp {group} {folder} && chmod g+rwxs {folder}"
        yield from _bind(folder, target)

    def _enter(self, pod: Pod, stage: Path) -> Iterator[str]:
        yield f"hostname {pod.name}"
        for container in pod.spec.get("initContainers", []):
            yield self._run(pod, container, container["command"], stage)
        yield f"exec {self._run(pod, pod.container, pod.command(), stage)}"

    def _run(self, pod: Pod, container: Mapping[str, Any], command: list[str], stage: Path) -> str:
        own = container["securityContext"]
        context = {**pod.spec["securityContext"], **own}
        assert own["capabilities"]["drop"] == ["ALL"] and not own["allowPrivilegeEscalation"]
        assert context["runAsUser"] != 0 or not context["runAsNonRoot"]
        path = _from_dockerfile("ENV").partition("PATH=")[2].split()[0].replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
        variables = {"PATH": path, "HOME": "/home/runner", "HOSTNAME": pod.name, **_OF_KUBERNETES}
        variables |= {"PYTHONUNBUFFERED": "1", **pod.variables()}
        user = [f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}", f"--groups={context['fsGroup']}"]
        kept = ",".join(["-all", *(f"+{name.lower()}" for name in own["capabilities"].get("add", []))])
        safe = ["--no-new-privs", f"--bounding-set={kept}", "--inh-caps=-all"]
        words = [f"{name}={value}" for name, value in variables.items()]
        enter = ["setpriv", *user, *safe, "env", "-i", *words, "sh", "-c", 'cd "$0" && exec "$@"']
        return shlex.join(["chroot", str(stage / "root"), *enter, _from_dockerfile("WORKDIR"), *command])


def _check_known(pod: Pod) -> None:
    unknown = set(pod.spec) - _POD_FIELDS | set(pod.container) - _CONTAINER_FIELDS
    assert not unknown, f"{pod.name}: this kubelet does not know {', '.join(sorted(unknown))}"


def _bind(source: Path, target: Path) -> Iterator[str]:
    yield f"mkdir -p {target} && mount --rbind {source} {target}"


def _tmpfs(target: Path, options: str) -> Iterator[str]:
    yield f"mkdir -p {target} && mount -t tmpfs -o {options} tmpfs {target}"


def _devices(root: Path) -> Iterator[str]:
    yield from _tmpfs(root / "dev", "mode=755")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        yield f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}"
    yield f"ln -s /proc/self/fd {root}/dev/fd && ln -s fd/1 {root}/dev/stdout && ln -s fd/2 {root}/dev/stderr"
    # A runtime's own, which a volume at this path covers.
    yield from _tmpfs(root / "dev" / "shm", "mode=1777,size=64m")


def wait_for(condition: Any, kubelet: Kubelet, pods: list[Pod]) -> None:
    """Until it holds; all pods must live to see that."""
    while not condition():
        for pod in pods:
            assert kubelet.running[pod.name].poll() is None, kubelet.output(pod)
        time.sleep(0.05)
