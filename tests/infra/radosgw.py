"""Ceph's S3 gateway on this machine: one monitor, one OSD whose data are in memory, and radosgw, all on loopback.

Unlike small S3 servers it honours `If-None-Match`, has quotas, and checks signatures and clocks as production does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

# Several daemons fork; what they print goes nowhere, their logs are in the cluster's folder.
_START_TIMEOUT_S = 120

_CONFIGURATION = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = {monitor}
public_network = 127.0.0.0/8
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {folder}/keyring
run_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
pid_file = {folder}/run/$name.pid
log_file = {folder}/log/$name.log
crash_dir = {folder}/log
setuser_match_path =
# One copy of everything.
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_max_pg_per_osd = 1000
# A disk of this machine that is nearly full is not the cluster's problem.
mon_data_avail_crit = 1
mon_data_avail_warn = 2
mon_osd_full_ratio = .99
mon_osd_nearfull_ratio = .98
[mon]
mon_data = {folder}/mon
[osd]
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = {memory_bytes}
osd_memory_target = 1073741824
# The names of objects fit into any file system then.
osd_max_object_name_len = 256
osd_max_object_namespace_len = 64
[client.rgw]
rgw_data = {folder}/rgw
# Without tcp_nodelay a GET waits 40 ms for the client's delayed acknowledgement.
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_dns_name = localhost
rgw_thread_pool_size = 32
"""

# Who may do what: the monitor itself, the administrator, the OSD and the gateway.
_KEYS = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
    "client.rgw": {"mon": "allow rw", "osd": "allow rwx"},
}


@dataclass(frozen=True)
class Cluster:
    """A cluster in a folder of its own.

    Attributes:
        folder: what the cluster keeps, logs and pid files included.
        port: where the gateway listens.
        monitor_ports: those of the monitor (protocol 2, protocol 1), since another cluster may run on this machine.
    """

    folder: Path
    port: int
    monitor_ports: tuple[int, int]

    def start(self, access_key: str, secret_key: str, memory_bytes: int = 6 << 30) -> None:
        """Make the cluster and one user of its gateway."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("mon", "osd", "rgw", "run", "log"):
            (self.folder / name).mkdir(parents=True)
        fsid = str(uuid.uuid4())
        second, first = self.monitor_ports
        monitor = f"[v2:127.0.0.1:{second},v1:127.0.0.1:{first}]"
        settings = {"fsid": fsid, "monitor": monitor, "folder": self.folder, "port": self.port}
        self._configuration.write_text(_CONFIGURATION.format(**settings, memory_bytes=memory_bytes))
        self._make_keys()
        map_file = str(self.folder / "monmap")
        self._tool("monmaptool", "--create", "--fsid", fsid, "--addv", "a", monitor, map_file)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_file, "--keyring", str(self.folder / "keyring"))
        self._run("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        # It may be there already.
        self._run("ceph", "osd", "crush", "add-bucket", "localhost", "host", check=False)
        self._run("ceph-osd", "-i", "0")
        self.start_gateway()
        user = ["--uid=test", "--display-name=test", f"--access-key={access_key}", f"--secret-key={secret_key}"]
        quiet = ["-n", "client.rgw", "--admin-socket=", "--log-file=/dev/null"]
        self._run("radosgw-admin", *quiet, "user", "create", *user)

    def start_gateway(self) -> None:
        """Start the gateway alone; the data are with the OSD."""
        self._run("radosgw", "-n", "client.rgw")

    def kill_gateway(self) -> None:
        """Kill the gateway at once; monitor and OSD go on."""
        os.kill(int((self.folder / "run" / "client.rgw.pid").read_text()), signal.SIGKILL)

    def stop(self) -> None:
        """Kill all daemons: nothing of a cluster in memory is worth an orderly end."""
        for path in (self.folder / "run").glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)

    @property
    def _configuration(self) -> Path:
        return self.folder / "ceph.conf"

    def _make_keys(self) -> None:
        keyring = str(self.folder / "keyring")
        for number, (entity, rights) in enumerate(_KEYS.items()):
            rights_given = [word for service, right in rights.items() for word in ("--cap", service, right)]
            created = [] if number else ["--create-keyring"]
            self._tool("ceph-authtool", *created, keyring, "--gen-key", "-n", entity, *rights_given)

    def _run(self, *command: str, check: bool = True) -> None:
        """A program that reads the configuration."""
        environment = {**os.environ, "CEPH_CONF": str(self._configuration), "CEPH_ARGS": f"-c {self._configuration}"}
        self._call(command, environment, check)

    def _tool(self, *command: str) -> None:
        """A program that does not."""
        environment = {key: value for key, value in os.environ.items() if key not in ("CEPH_CONF", "CEPH_ARGS")}
        self._call(command, environment, check=True)

    def _call(self, command: tuple[str, ...], environment: dict[str, str], check: bool) -> None:
        log = self.folder / "log" / "start.log"
        # A file, not a pipe: daemons keep it open.
        with log.open("a") as output:
            print("$", *command, file=output, flush=True)
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_START_TIMEOUT_S,
            )
        if check and done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}; {log} says:\n{log.read_text()[-3000:]}")
