"""The image, built and run by buildah and podman on a Debian base made here, without a registry.

Containers and images are in a storage of their own under the test's folder, and are removed afterwards.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from infra.parts import needs

ROOT = Path(__file__).parents[2]
DEBIAN_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
BASE, IMAGE = "localhost/base:test", "localhost/runner:test"
# Two minutes on two quiet cores, which is why it is not built by default.
BUILD_TIMEOUT_S = 1500
# As in the manifests; with limits that may always be set, because podman's defaults may exceed what is allowed.
RUN_OPTIONS = [
    "--network=none",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=4096:4096",
]
# Half a minute on two quiet cores; stopped after five steps, then finished.
JOB = ["--output-dir=/data/run", "--set=restart.grace_s=60"]
# The version that torch 2.13 needs.
TRITON = "triton==3.7.1"
LAUNCHER = r"""
import bitsandbytes, pynvml, triton
from triton.runtime.build import compile_module_from_src
source = r'''
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", "", -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
'''
print("compiled", compile_module_from_src(source, "launcher").answer())
"""


# One worker of pytest-xdist, where it is used, builds the image once.
pytestmark = [
    pytest.mark.soak,
    needs("image tools"),
    needs("CPU build of torch"),
    pytest.mark.timeout(2 * BUILD_TIMEOUT_S),
    pytest.mark.xdist_group("image"),
]


class Containers:
    """buildah and podman on a storage of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "BUILDAH_ISOLATION": "chroot"}
        (folder / "tmp").mkdir()
        storage = [f"--root={folder / 'root'}", f"--runroot={folder / 'runroot'}"]
        # overlay is quick; with a folder on a file system that does not support it, every layer is a copy.
        overlay = subprocess.run(["buildah", *storage, "--storage-driver=overlay", "info"], capture_output=True)
        self._storage = [*storage, f"--storage-driver={'overlay' if overlay.returncode == 0 else 'vfs'}"]

    def buildah(self, *arguments: str) -> str:
        return self._check(["buildah", *self._storage, *arguments])

    def podman(self, *arguments: str) -> str:
        return self._check(self._podman(arguments))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = self._podman(("run", *RUN_OPTIONS, *arguments))
        return subprocess.Popen(
            command,
            env=self._environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start("--rm", *arguments)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def close(self) -> None:
        # End the processes and their mounts; the images are removed with the folder.
        self._check(self._podman(("rm", "--all", "--force", "--time=0")))
        for point in sorted(mounts_below(self.folder), reverse=True):
            subprocess.run(["umount", "--lazy", point], check=True)
        shutil.rmtree(self.folder)

    def _podman(self, arguments: tuple[str, ...]) -> list[str]:
        # No systemd and no journald: a plain cgroup and a plain log.
        plain = ["--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=none"]
        return ["podman", *self._storage, *plain, f"--tmpdir={self.folder / 'tmp'}", *arguments]

    def _check(self, command: list[str]) -> str:
        result = subprocess.run(
            command,
            env=self._environment,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BUILD_TIMEOUT_S,
        )
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
        return result.stdout


def mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if Path(line.split()[1]).is_relative_to(folder)]


def pip_as_here(folder: Path) -> list[str]:
    """Mounts that give a build the package index, the wheels and the certificates of this machine's pip.

    The Dockerfile stays as users have it; what pip takes from files here is not downloaded.
    """
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings: dict[str, str] = {}
    paths: set[Path] = set()
    for line in sorted(listed.stdout.splitlines(), reverse=True):  # :env: goes before the files
        key, _, quoted = line.partition("=")
        settings.setdefault(key.rpartition(".")[2], ast.literal_eval(quoted))
    for word in " ".join(settings.values()).split():
        # An index of files refers to neighbouring files.
        path = Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word)
        if path.is_absolute() and path.exists():
            paths.add(path)
    config = folder / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    return [f"--volume={config}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in sorted(paths))]


def make_base(containers: Containers) -> None:
    """Debian with Python: what python:3.11-slim is, as far as the Dockerfile is concerned."""
    name = containers.buildah("from", "scratch").strip()
    root = containers.buildah("mount", name).strip()
    command = [
        "mmdebstrap",
        "--variant=minbase",
        "--include=python3-venv",
        "--dpkgopt=force-unsafe-io",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "bookworm",
        root,
        *([str(DEBIAN_SOURCES)] if DEBIAN_SOURCES.is_file() else []),
    ]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=BUILD_TIMEOUT_S)
    assert result.returncode == 0, result.stderr[-4000:]
    containers.buildah("umount", name)
    containers.buildah("commit", "--quiet", "--rm", name, BASE)


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    # podman needs a short path; pytest's folders have longer ones in a worker.
    folder = Path(tempfile.mkdtemp(prefix="image-", dir="/tmp"))
    containers = Containers(folder)
    try:
        make_base(containers)
        containers.buildah(
            "build",
            "--isolation=chroot",
            "--layers=false",
            f"--build-arg=BASE={BASE}",
            # This machine's torch may be another file than PyPI's, as on the machine of CI.
            "--build-arg=TORCH_INDEX=https://pypi.org/simple",
            *pip_as_here(folder),
            f"--tag={IMAGE}",
            str(ROOT),
        )
        yield containers
    finally:
        containers.close()
        assert not folder.exists() and not mounts_below(folder)


def test_the_image_answers_as_a_user_without_rights(containers: Containers) -> None:
    code, output = containers.run(IMAGE, "--help")
    assert code == 0 and "Run PyTorch training jobs that survive" in output
    assert containers.run("--entrypoint=id", IMAGE, "-u") == (0, "1000\n")
    config = json.loads(containers.buildah("inspect", "--type=image", IMAGE))["OCIv1"]["config"]
    assert config["Entrypoint"] == ["runner"] and config["User"] == "1000:1000"
    # Only the files that the Dockerfile names are copied from the repository.
    code, output = containers.run("--entrypoint=ls", IMAGE, "/opt/runner")
    assert output.split() == [
        "LICENSE",
        "README.md",
        "checkpointing",
        "configs",
        "constraints.txt",
        "image.txt",
        "pyproject.toml",
        "requirements.py",
        "requirements.txt",
        "runner",
    ]
    # Errors keep their exit code on the way out, by either entry point; a PyTorchJob's is there.
    assert containers.run(IMAGE, "start", "--config=/none.yaml")[0] == 2
    assert containers.run("--entrypoint=kubeflow-start", IMAGE, "--config=/none.yaml")[0] == 2


def test_the_image_has_what_gpu_kernels_are_compiled_with(containers: Containers) -> None:
    """As Triton, which comes with a torch for CUDA, compiles the launcher of a kernel: against Python's headers.

    No GPU is needed for that, nor for importing what quantises.
    """
    name = containers.buildah("from", IMAGE).strip()
    pip = ["/opt/venv/bin/pip", "install", "--quiet", "--disable-pip-version-check", TRITON]
    mounts = pip_as_here(containers.folder)
    containers.buildah("run", "--isolation=chroot", "--user=0", *mounts, name, "--", *pip)
    containers.buildah("commit", "--quiet", "--rm", name, f"{IMAGE}-triton")
    code, output = containers.run("--entrypoint=python", f"{IMAGE}-triton", "-c", LAUNCHER)
    assert code == 0 and output.endswith("compiled 42\n"), output


def test_a_stopped_container_has_committed_and_the_next_one_goes_on(containers: Containers, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, 1000, 1000)  # what fsGroup does
    options = [f"--volume={volume}:/data", IMAGE, "start", *JOB]
    # The job runs long enough to be stopped, and ends soon after it is resumed.
    process = containers.start("--name=run", *options, "--set=trainer.max_steps=500")
    wait_for_event(volume / "run", process, "log")
    # As a kubelet stops a pod: SIGTERM to process 1, and SIGKILL after the grace period.
    containers.podman("stop", "--time=120", "run")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 75, output
    assert events(volume / "run", "run_started")[-1]["pid"] == 1
    stopped_at = events(volume / "run", "committed")[-1]["step"]
    assert 0 < stopped_at < 500
    assert (volume / "run" / "checkpoints" / f"checkpoint-{stopped_at}" / "manifest.json").is_file()
    # 75 asks the scheduler for a restart.
    code, output = containers.run(*options, f"--set=trainer.max_steps={stopped_at + 5}")
    assert code == 0, output
    assert events(volume / "run", "attempt_ended")[-1]["start_step"] == stopped_at
    assert (volume / "run" / "best_model" / "model.safetensors").is_file()


def events(run: Path, name: str) -> list[dict[str, int]]:
    lines = (run / "journal.jsonl").read_text().splitlines() if (run / "journal.jsonl").exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["event"] == name]


def wait_for_event(run: Path, process: subprocess.Popen[str], name: str) -> None:
    while not events(run, name):
        if process.poll() is not None:
            raise AssertionError(f"the container ended early:\n{process.communicate()[0]}")
        time.sleep(0.05)
