"""What the doctor makes of what it sees."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from helpers.receiver import receiver
from infra.ports import free_port

from runner.config.schema import Config, LaunchConfig
from runner.doctor.collectives import judge
from runner.doctor.findings import Finding, Level
from runner.doctor.gpu_checks import check_devices, links_between_gpus, links_in, topology
from runner.doctor.settings import check_settings, check_webhook
from runner.system.gpus import find_gpus


def settings(environment: Mapping[str, str], ranks: int = 2, nnodes: int = 1, **launch: object) -> dict[str, Level]:
    config = Config(launch=LaunchConfig.model_validate(launch))
    return {one.subject: one.level for one in check_settings(config, environment, ranks, nnodes, on_gpu=False)}


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("NCCL_SOCKET_IFNAME", "lo", Level.OK),
        ("NCCL_SOCKET_IFNAME", "l", Level.OK),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=l", Level.FAIL),
        ("NCCL_SOCKET_IFNAME", "=lo", Level.OK),
        ("NCCL_SOCKET_IFNAME", "^nothing", Level.OK),
        ("NCCL_SOCKET_IFNAME", "wrong0,lo", Level.OK),
        ("NCCL_SOCKET_IFNAME", "wrong0", Level.FAIL),
        ("GLOO_SOCKET_IFNAME", "lo", Level.OK),
        ("GLOO_SOCKET_IFNAME", "l", Level.FAIL),
        ("NCCL_DEBUG", "INFO", Level.WARN),
        ("NCCL_P2P_DISABLE", "1", Level.WARN),
        ("CUDA_LAUNCH_BLOCKING", "1", Level.WARN),
        ("CUDA_VISIBLE_DEVICES", "", Level.WARN),
        ("OMP_NUM_THREADS", "4096", Level.WARN),
        ("LOCAL_RANK", "0", Level.WARN),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", Level.FAIL),
    ],
)
def test_variables(variable: str, value: str, level: Level) -> None:
    assert settings({variable: value})[variable] is level


def test_nothing_is_wrong() -> None:
    assert settings({"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}, ranks=1) == {"environment": Level.OK}


def test_all_interfaces_excluded() -> None:
    every = ",".join(psutil.net_if_addrs())
    assert settings({"NCCL_SOCKET_IFNAME": f"^{every}"})["NCCL_SOCKET_IFNAME"] is Level.FAIL


def test_addresses_and_ports() -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    found = settings({}, nnodes=2, rdzv_endpoint=endpoint)
    assert found["rendezvous"] is Level.OK and found["launch.peer_port"] is Level.OK
    with socket.create_server(("", port)):
        assert settings({}, nnodes=2, rdzv_endpoint=endpoint)["rendezvous"] is Level.FAIL
        # Another machine's runner does not listen there.
        assert settings({}, nnodes=2, rdzv_endpoint=endpoint, node_rank=1)["rendezvous"] is Level.OK
    assert settings({}, nnodes=2, rdzv_endpoint="192.0.2.7:29500")["rendezvous"] is Level.FAIL
    assert settings({}, nnodes=2, rdzv_endpoint="192.0.2.7:29500", node_rank=1)["rendezvous"] is Level.OK
    own = next(
        (a.address for addresses in psutil.net_if_addrs().values() for a in addresses
         if a.family is socket.AF_INET and not a.address.startswith("127.")), None
    )  # fmt: skip
    if own is not None:
        assert settings({}, nnodes=2, rdzv_endpoint=f"{own}:29500", node_rank=1)["rendezvous"] is Level.FAIL


def test_ranks_are_judged() -> None:
    def ranks(*compute_s: float, right: bool = True) -> dict[str, object]:
        return {
            "backend": "nccl",
            "ranks": [
                {"rank": n, "host": f"host{n}", "right": right, "bandwidth": {"1048576": 1e9 * (n + 1)}, "compute_s": s}
                for n, s in enumerate(compute_s)
            ],
        }

    good = list(judge(ranks(1.0, 1.1, 1.0)))
    assert [one.level for one in good] == [Level.OK, Level.OK] and "1.00 GB/s at 1 MiB" in good[0].text
    two = list(judge(ranks(1.0, 1.8)))
    assert two[1].level is Level.WARN and "rank 1 on host1 takes 1.8 times" in two[1].text
    slow = list(judge(ranks(1.0, 1.0, 2.0)))
    assert slow[1].level is Level.WARN and "rank 2 on host2 takes 2.0 times" in slow[1].text
    wrong = list(judge(ranks(1.0, 1.0, right=False)))
    assert [one.level for one in wrong] == [Level.FAIL] and "rank 0, 1" in wrong[0].text


# As the tool prints them; no GPU is at hand here.
QUERY = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 3, 0, 5, 5, 16, 16, Not Active, Disabled
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 70000, 2, 1, 5, 8, 16, Active, Disabled
"""
TOPOLOGY = """\
	\x1b[4mGPU0	GPU1	CPU Affinity	NUMA Affinity	GPU NUMA ID\x1b[0m
GPU0	 X 	NV18	0-51	0		N/A
GPU1	NV18	 X 	0-51	0		N/A
"""


def test_gpus_as_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    (tmp_path / "query").write_text(QUERY)
    (tmp_path / "topology").write_text(TOPOLOGY)
    tool.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat {tmp_path}/topology; else cat {tmp_path}/query; fi\n')
    tool.chmod(0o755)
    assert [gpu.memory_bytes for gpu in find_gpus()] == [81559 * 2**20] * 2
    for visible, seen in (("1", [1]), ("GPU-bb,0", [1, 0]), ("0,7,1", [0]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.index for gpu in find_gpus()] == seen
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = list(check_devices(4))
    told = [(one.level, one.subject) for one in found]
    assert told == [
        (Level.OK, "GPUs"), (Level.FAIL, "GPUs"),
        (Level.FAIL, "GPU 1"), (Level.WARN, "GPU 1"), (Level.WARN, "GPU 1"), (Level.WARN, "GPU 1"),
        (Level.OK, "topology"),
    ]  # fmt: skip
    assert found[-1].text == "1 pair by NVLink"
    tool.write_text("#!/bin/sh\necho Driver/library version mismatch; exit 18\n")
    assert not find_gpus()
    (broken,) = check_devices(2)
    assert broken.level is Level.FAIL and "version mismatch" in broken.text
    assert not links_between_gpus()


def matrix(num_gpus: int, link: Callable[[int, int], str], nics: int = 0, header: str = "\t", gap: str = "\t") -> str:
    """`nvidia-smi topo -m` of a machine whose GPUs are joined so, with columns for so many network cards."""
    gpus = [f"GPU{number}" for number in range(num_gpus)]
    cards = [f"NIC{number}" for number in range(nics)]
    lines = [header + gap.join([*gpus, *cards, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for one in range(num_gpus):
        cells = [" X " if one == other else link(min(one, other), max(one, other)) for other in range(num_gpus)]
        to_cards = ["PIX" if card == one else ("NODE" if card // 4 == one // 4 else "SYS") for card in range(nics)]
        lines.append(gap.join([gpus[one], *cells, *to_cards, "0-55,112-167", "0", "", "N/A"]))
    for card in range(nics):
        lines.append(
            gap.join([cards[card], *["SYS"] * num_gpus, *[" X " if card == n else "SYS" for n in range(nics)]])
        )
    return "\n".join([*lines, "", "NIC Legend:", "", "  NIC0: mlx5_0", ""])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # HGX boards of H100, H200 and B200 (NV18) and A100 (NV12), with and without their network cards.
        (matrix(8, lambda one, other: "NV18"), "28 pairs by NVLink"),
        (matrix(8, lambda one, other: "NV18", nics=16, header="\t\x1b[4m"), "28 pairs by NVLink"),
        (matrix(8, lambda one, other: "NV12", nics=10), "28 pairs by NVLink"),
        # L40S and L4 have no NVLink: pairs behind one switch, the rest over the host bridge or the other processor.
        (
            matrix(4, lambda one, other: "PIX" if one // 2 == other // 2 else "NODE", header=""),
            "4 pairs by PCIe, 2 pairs by one PCIe switch",
        ),
        (matrix(2, lambda one, other: "PHB", nics=2, gap="   "), "1 pair by PCIe"),
        # A100 and H100 PCIe cards with bridges between two each.
        (
            matrix(4, lambda one, other: "NV12" if one // 2 == other // 2 else "SYS"),
            "4 pairs by PCIe and the link between the processors, 2 pairs by NVLink",
        ),
        ("GPU0\n", None),
        ("", None),
    ],
)
def test_links_between_gpus(text: str, told: str | None) -> None:
    """In the forms that drivers since 525 print; columns of network cards say nothing about the GPUs."""
    found = list(topology(links_in(text)))
    assert [one.text for one in found[:1]] == ([told] if told is not None else [])
    unequal = told is not None and "NVLink" in told and "," in told
    assert [one.level for one in found[1:]] == [Level.WARN] * unequal


CARDS = {
    "NVIDIA L4": 23034, "NVIDIA L40S": 46068, "NVIDIA A100-SXM4-40GB": 40960, "NVIDIA A100-SXM4-80GB": 81920,
    "NVIDIA A100 80GB PCIe": 81920, "NVIDIA H100 80GB HBM3": 81559, "NVIDIA H100 PCIe": 81559,
    "NVIDIA H100 NVL": 95830, "NVIDIA H200": 143771, "NVIDIA B200": 183359,
}  # fmt: skip


@pytest.mark.parametrize(("name", "mebibytes"), CARDS.items())
def test_cards(name: str, mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and sizes as `nvidia-smi` has them; L4 and L40S know no NVLink, a virtual machine no link width."""
    answer(
        f"0, GPU-a, {name}, 580.95.05, {mebibytes}, 1, [N/A], 4, 4, [N/A], [N/A], Not Active, [N/A]",
        tmp_path,
        monkeypatch,
    )
    assert [gpu.memory_bytes for gpu in find_gpus()] == [mebibytes * 2**20]
    assert [(one.level, one.text) for one in check_devices(1)] == [(Level.OK, f"1 x {name}, driver 580.95.05")]


@pytest.mark.parametrize(
    ("changed", "level", "told"),
    [
        ({5: "[GPU requires reset]"}, Level.FAIL, "GPU requires reset"),
        ({9: "[Unknown Error]"}, Level.FAIL, "Unknown Error"),
        ({6: "ERR!"}, Level.FAIL, "ERR!"),
        ({12: "Enabled"}, Level.WARN, "MIG is enabled"),
        ({12: "Disabled", 6: "[Not Supported]"}, None, ""),
    ],
)
def test_what_a_card_says_of_itself(
    changed: dict[int, str], level: Level | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = [
        "0",
        "GPU-a",
        "NVIDIA H100 80GB HBM3",
        "580.95.05",
        "81559",
        "1",
        "0",
        "5",
        "5",
        "16",
        "16",
        "Not Active",
        "Disabled",
    ]
    answer(", ".join(changed.get(number, value) for number, value in enumerate(row)), tmp_path, monkeypatch)
    found = list(check_devices(1))[1:]
    assert [one.level for one in found] == ([level] if level is not None else [])
    assert all(told in one.text for one in found)


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "Unable to determine the device handle for GPU0000:C3:00.0: GPU is lost. Reboot the system",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
)
def test_a_driver_that_does_not_answer(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(text, tmp_path, monkeypatch, status=9)
    assert not find_gpus()
    (found,) = check_devices(1)
    assert found.level is Level.FAIL and " ".join(text.split()) in found.text


def answer(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
    """Have a tool that prints this."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\necho '{text.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'; exit {status}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


# It knows the older name of what slows a clock down only by another one, as drivers from 535 on do.
NEWER_TOOL = """#!{python}
import sys
NAMES = "index uuid name driver_version memory.total memory.used"
KNOWN = dict(zip(NAMES.split(), "0 GPU-a L4 580.65 23034 1".split()))
fields = sys.argv[1].partition("=")[2].split(",")
for field in fields:
    if field not in KNOWN:
        print(f'Field "{{field}}" is not a valid field to query.\\n')
        sys.exit(2)
print(", ".join(KNOWN[field] for field in fields))
"""


def test_a_field_that_a_driver_does_not_know_hides_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NEWER_TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    assert [gpu.memory_bytes for gpu in find_gpus()] == [23034 * 2**20]
    assert [one.level for one in check_devices(1)] == [Level.OK]


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert list(check_devices(2)) == [Finding(Level.OK, "GPUs", "none; ranks train on the CPU, over gloo")]


# -- notifications -------------------------------------------------------------------------------------------------


def test_a_test_message_is_posted() -> None:
    with receiver() as served:
        config = Config.model_validate({"notify": {"url": served.url}})
        [found] = check_webhook(config, {})
    assert found.level is Level.OK and served.kinds == ["run.test"]
    assert "messages of the run arrive here" in served.messages[0]["data"]["text"]


@pytest.mark.parametrize(
    ("notify", "problem"),
    [
        ({}, "there is no address"),
        ({"url": "http://127.0.0.1:1/t0ken"}, "the test message was not taken: Connection refused"),
        ({"url": "http://127.0.0.1:1/t0ken", "secret_env": "KEY"}, "the variable KEY is not set"),
    ],
)
def test_what_would_keep_messages_from_arriving(notify: dict[str, str], problem: str) -> None:
    [found] = check_webhook(Config.model_validate({"notify": notify}), {})
    assert found.level is Level.FAIL and problem in found.text and "t0ken" not in found.text + found.fix
