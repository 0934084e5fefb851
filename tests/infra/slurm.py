"""Slurm on this machine: munge, a controller, and two nodes n1 and n2 that are daemons (Debian builds it so).

Jobs of the partition `high` preempt those of `main`: SIGTERM, 20 s of grace, requeued.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.parts import find
from infra.ports import free_ports

_DAEMONS = ("munged", "slurmctld", "slurmd")
_START_TIMEOUT_S = 60
# Where libmunge looks by default.
_MUNGE_SOCKET = Path("/run/munge/munge.socket.2")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that is queued again waits for the credentials of its earlier session to expire.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={node_timeout_s}
InactiveLimit=0
KillWait=5
MinJobAge=300
OverTimeLimit=0
JobRequeue=1
UnkillableStepTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
"""
_NODE = (
    "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
)


@dataclass(frozen=True)
class Slurm:
    """A cluster in a folder of its own, which other users can read."""

    folder: Path

    @property
    def configuration(self) -> str:
        return str(self.folder / "slurm.conf")

    @property
    def log(self) -> Path:
        """What the jobs of `submit` print."""
        return self.folder / "job.log"

    def command(self, *command: str, **environment: str) -> str:
        """Run a program of Slurm and return what it prints."""
        environment = {**os.environ, "SLURM_CONF": self.configuration, **environment}
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60, env=environment, cwd=self.folder
        ).stdout.strip()

    def show(self, job: str, field: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{field}=(\S+)", self.command("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def pid(self, daemon: str) -> int:
        return int((self.folder / "run" / f"{daemon}.pid").read_text())

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to it: daemons, jobs, and what jobs have started."""
        marker = f"SLURM_CONF={self.configuration}".encode()
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(pid))
        return found

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 500) -> None:
        """Wait until a condition holds; fails with the queue and the jobs' output."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                log = self.log.read_text() if self.log.exists() else "(no log)"
                raise AssertionError(f"{what}: not within {timeout_s:.0f} s\n{self.command('squeue')}\n{log}")
            time.sleep(0.05)

    def wait_for_end(self, job: str) -> str:
        """Wait for a job's end and return its last state."""
        self.wait_for(lambda: self.show(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED"), f"end of job {job}")
        return self.show(job, "JobState")

    def start(self, node_timeout_s: int) -> None:
        """Start the daemons and wait until both nodes are idle."""
        for name in ("run", "log", "state", "spool"):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        controller, *ports = free_ports(3)
        nodes = [_NODE.format(number=number, host=host, port=port) for number, port in enumerate(ports, 1)]
        settings = {"folder": self.folder, "host": host, "port": controller, "node_timeout_s": node_timeout_s}
        Path(self.configuration).write_text(_CONFIGURATION.format(nodes="\n".join(nodes), **settings))
        self._start_munge()
        self._start_daemon("slurmctld", "-f", self.configuration)
        for number in (1, 2):
            self._start_daemon("slurmd", "-N", f"n{number}", "-f", self.configuration)
        self.wait_for(lambda: self._num_idle() == "2", "two idle nodes", _START_TIMEOUT_S)

    def stop(self) -> None:
        """Stop all daemons and end what jobs have left, each by its pid."""
        # munged is another user's process, whose environment does not name the cluster; the others need it to the last.
        files = sorted((self.folder / "run").glob("*.pid"), key=lambda file: file.name == "munged.pid")
        daemons = []
        for file in files:
            with contextlib.suppress(psutil.Error, ValueError):
                process = psutil.Process(int(file.read_text()))
                if process.name() in _DAEMONS:
                    process.terminate()
                    daemons.append(process)
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=0.5)
        _, alive = psutil.wait_procs(daemons, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        assert not self.processes()

    def _num_idle(self) -> str:
        try:
            return self.command("sinfo", "-h", "-t", "idle", "-o", "%D")
        except subprocess.CalledProcessError:
            return ""

    def _start_munge(self) -> None:
        """A daemon of this machine that runs already is used, and stays."""
        if any(process.info["name"] == "munged" for process in psutil.process_iter(["name"])):
            return
        own = self.folder / "munge"
        own.mkdir(mode=0o700)
        key = own / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        _MUNGE_SOCKET.parent.mkdir(exist_ok=True)
        _MUNGE_SOCKET.parent.chmod(0o755)
        for path in (own, key, _MUNGE_SOCKET.parent):
            shutil.chown(path, "munge", "munge")
        files = [f"--key-file={key}", f"--log-file={own}/munged.log", f"--pid-file={own}/munged.pid"]
        files += [f"--seed-file={own}/munge.seed", f"--socket={_MUNGE_SOCKET}"]
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        self._start_daemon(*user, _munged(), "--force", *files)
        shutil.copy(own / "munged.pid", self.folder / "run" / "munged.pid")

    def _start_daemon(self, *command: str) -> None:
        """One that forks when it is ready. Its output goes to a file, which it keeps open."""
        log = self.folder / "log" / "start.log"
        with log.open("a") as output:
            done = subprocess.run(
                command,
                env={**os.environ, "SLURM_CONF": self.configuration},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_START_TIMEOUT_S,
            )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{log.read_text()}"


def _munged() -> str:
    # setpriv looks for it in a PATH of its own.
    found = find("munged")
    assert found is not None
    return found


@contextlib.contextmanager
def slurm_cluster(folder: Path, node_timeout_s: int = 15) -> Iterator[Slurm]:
    """A running cluster.

    Args:
        folder: empty, and readable for munge's user.
        node_timeout_s: after how many silent seconds a node counts as lost, and its jobs are queued again.
    """
    slurm = Slurm(folder)
    try:
        slurm.start(node_timeout_s)
        yield slurm
    finally:
        slurm.stop()
