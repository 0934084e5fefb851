"""Environment variables and addresses that do not work, or work badly."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

from runner.config.schema import Config
from runner.doctor.findings import Finding, fail, ok, warn
from runner.errors import UsageError
from runner.session.notifications import Notification
from runner.session.webhook import post, signing_key


def check_settings(
    config: Config, environment: Mapping[str, str], num_ranks: int, nnodes: int, *, on_gpu: bool
) -> Iterator[Finding]:
    """Compare the environment and the section `launch:` with this node and its ranks."""
    interfaces = psutil.net_if_addrs()
    found = [*_interfaces(environment, set(interfaces)), *_variables(environment, num_ranks, nnodes, on_gpu)]
    found += _addresses(config, nnodes, {a.address for addresses in interfaces.values() for a in addresses})
    yield from found or [ok("environment", "no problem found")]


def _interfaces(environment: Mapping[str, str], names: Collection[str]) -> Iterator[Finding]:
    known = ", ".join(sorted(names))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        if not value:
            continue
        wanted = [name for name in value.lstrip("^=").split(",") if name]
        if variable.startswith("NCCL"):
            # "eth" is a prefix, "=eth0" an exact name, "^docker" excludes a prefix.
            if value.startswith("^"):
                exists = any(not any(name.startswith(w) for w in wanted) for name in names)
            elif value.startswith("="):
                exists = any(name in wanted for name in names)
            else:
                exists = any(name.startswith(w) for w in wanted for name in names)
        else:
            exists = all(name in names for name in wanted)
        if exists:
            yield ok(variable, value)
        else:
            yield fail(variable, f"{value!r}: no such network interface", f"set it to one of {known}, or unset it")


def has_rdma() -> bool:
    """Return whether this node has a network card for RDMA (InfiniBand, RoCE or EFA)."""
    cards = Path("/sys/class/infiniband")
    return cards.is_dir() and any(cards.iterdir())


def _variables(environment: Mapping[str, str], num_ranks: int, nnodes: int, on_gpu: bool) -> Iterator[Finding]:
    debug = environment.get("NCCL_DEBUG", "").upper()
    if debug in ("INFO", "TRACE"):
        yield warn("NCCL_DEBUG", f"{debug} logs every operation", "set it to WARN, or unset it")
    for variable in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if environment.get(variable, "0") not in ("", "0") and num_ranks > 1:
            yield warn(variable, "the GPUs of this node communicate over a slower path", "unset it")
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0") and nnodes > 1 and has_rdma():
        yield warn("NCCL_IB_DISABLE", "this node has InfiniBand or RoCE, which stays unused", "unset it")
    threads = environment.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    if threads.isdigit() and int(threads) > 1 and int(threads) * num_ranks > cores:
        text = f"{threads} threads in each of {num_ranks} ranks, on {cores} cores"
        yield warn("OMP_NUM_THREADS", text, f"set it to {max(cores // num_ranks, 1)}, or unset it")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and not on_gpu and num_ranks * nnodes > 1:
        text = "with DETAIL, torch 2.13 crashes (segmentation fault) when DDP is created over gloo"
        yield fail("TORCH_DISTRIBUTED_DEBUG", text, "set it to INFO, or unset it")
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield warn("CUDA_LAUNCH_BLOCKING", "training waits for every kernel", "unset it after debugging")
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        yield warn("CUDA_VISIBLE_DEVICES", "empty, which hides all GPUs", "unset it, or list the GPUs")
    if environment.get("LOCAL_RANK") and not environment.get("TORCHELASTIC_RUN_ID"):
        yield warn("LOCAL_RANK", "set from outside, but each rank needs its own", "unset it")


def _addresses(config: Config, nnodes: int, own: Collection[str]) -> Iterator[Finding]:
    """Check the addresses and ports that this node will use."""
    launch = config.launch
    ports = {}
    if config.monitoring.port is not None and launch.node_rank == 0:
        ports["monitoring.port"] = (config.monitoring.address, config.monitoring.port)
    if nnodes > 1:
        host, _, port = launch.endpoint.rpartition(":")
        host = host.strip("[]")
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError as error:
            fix = "set --rdzv-endpoint or MASTER_ADDR to an address of the first node that all others can reach"
            yield fail("rendezvous", f"{host!r} cannot be resolved: {error.strerror or error}", fix)
            return
        is_here = bool(addresses & set(own)) or "0.0.0.0" in addresses
        is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
        if launch.node_rank == 0 and not is_here:
            yield fail("rendezvous", f"{host} is not an address of this node, whose --node-rank is 0", "check both")
            return
        if launch.node_rank > 0 and is_here and not is_loopback:
            yield fail("rendezvous", f"{host} is this node, whose --node-rank is {launch.node_rank}", "check both")
            return
        if launch.node_rank == 0:
            ports |= {"rendezvous": ("", int(port)), "launch.peer_port": ("", launch.peer_address[1])}
        yield ok("rendezvous", f"{launch.endpoint}, {'this node' if is_here else 'another node'}")
    for subject, (address, number) in ports.items():
        try:
            with socket.create_server((address, number)):
                yield ok(subject, f"port {number} is free")
        except OSError as error:
            yield fail(
                subject,
                f"port {number} cannot be used: {error.strerror}",
                "stop the process that uses it, or set another port",
            )


def check_webhook(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Post a test message to `notify.url`."""
    if config.notify.url is None:
        yield fail("notify", "there is no address", "set RUNNER_NOTIFY_URL or notify.url")
        return
    try:
        key = signing_key(config.notify, environment)
    except UsageError as error:
        yield fail("notify", str(error), "set the variable where the run is started")
        return
    host = socket.gethostname()
    text = f"[test] messages of the run arrive here (runner doctor, {host})"
    problem, _ = post(config.notify, key, Notification("test", text, {"host": host}, time.time()))
    if problem:
        yield fail("notify", f"the test message was not taken: {problem}", "check notify.url")
    else:
        yield ok("notify", "the test message was taken")
