"""What launchers within a command line say of ranks and nodes is taken over, and what contradicts is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.errors import UsageError
from runner.program.nested_launchers import unnested
from runner.program.program import Program


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("accelerate.yaml").write_text("num_processes: 4\nnum_machines: 2\nmachine_rank: 1\nmixed_precision: bf16\n")


def command(line: str, **environment: str) -> tuple[Program, Program | None, dict[str, Any]]:
    name, *args = line.split()
    kind: Any = "module" if "." in name else "command"
    found = unnested(Program(kind, name if kind == "module" else f"/venv/bin/{name}", tuple(args)), environment)
    return found.program, found.inner, {key.removeprefix("launch."): value for key, value, _ in found.settings}


TRAIN = Program("script", "train.py", ("--lr", "1"))


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("torchrun train.py --lr 1", {}),
        ("torchrun --standalone --nproc-per-node 4 train.py --lr 1", {"nproc_per_node": "4"}),
        ("torchrun --nproc_per_node=gpu train.py --lr 1", {"nproc_per_node": "gpu"}),
        ("torchrun --rdzv-id 7 --log-dir logs --nnodes=1:4 train.py --lr 1", {"nnodes": "1:4"}),
        (
            "torch.distributed.run --nnodes 2 --node_rank 1 --master_addr a --master_port 1 train.py --lr 1",
            {"nnodes": "2", "node_rank": "1", "master_addr": "a", "master_port": "1"},
        ),
    ],
)
def test_of_torchrun_the_program_is_left(line: str, settings: dict[str, str]) -> None:
    assert command(line) == (TRAIN, TRAIN, settings)


def test_a_module_that_torchrun_starts_is_one() -> None:
    program, inner, _ = command("torchrun --nproc-per-node 2 -m json.tool x --nnodes 3")
    assert program == inner == Program("module", "json.tool", ("x", "--nnodes", "3"))


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("", {}),
        ("--num_processes 2 --mixed_precision bf16", {"nproc_per_node": 2}),
        ("--num_processes 8 --num_machines 2 --machine_rank 1", {"nproc_per_node": 4, "nnodes": "2", "node_rank": "1"}),
        ("--config_file accelerate.yaml", {"nproc_per_node": 2, "nnodes": 2, "node_rank": 1}),
        ("--config_file accelerate.yaml --num_processes 6", {"nproc_per_node": 3, "nnodes": 2, "node_rank": 1}),
    ],
)
def test_accelerate_is_kept_as_it_prepares_the_ranks(options: str, settings: dict[str, Any]) -> None:
    for name in ("accelerate launch", "accelerate-launch", "accelerate.commands.launch"):
        program, inner, found = command(f"{name} {options} train.py --lr 1")
        assert (program.label, inner, found) == (name.split()[0], TRAIN, settings)


@pytest.mark.parametrize(
    ("line", "environment", "settings"),
    [
        ("llamafactory-cli train job.yaml", {}, {}),
        ("lmf train job.yaml", {"NPROC_PER_NODE": "4", "NNODES": "1"}, {"nproc_per_node": "4", "nnodes": "1"}),
        ("swift sft --model x", {"NPROC_PER_NODE": "2"}, {"nproc_per_node": "2"}),
        ("trl sft --num_processes 2 --model x", {"NPROC_PER_NODE": "8"}, {"nproc_per_node": 2}),
        ("trl sft --accelerate_config zero3", {}, {}),
        ("axolotl train job.yml --num-processes 2", {}, {"nproc_per_node": 2}),
        ("axolotl train job.yml --launcher torchrun -- --nproc_per_node=2", {}, {"nproc_per_node": "2"}),
        ("tune run --nproc_per_node 2 full_finetune --config c", {}, {"nproc_per_node": "2"}),
    ],
)
def test_what_frameworks_say_of_ranks_is_taken_over(
    line: str, environment: dict[str, str], settings: dict[str, Any]
) -> None:
    program, inner, found = command(line, **environment)
    assert (program.label, inner, found) == (line.split()[0], None, settings)


@pytest.mark.parametrize("line", ["accelerate config", "tune ls", "tensorboard --num_processes 2", "pip install x"])
def test_other_commands_say_nothing(line: str) -> None:
    assert command(line)[2] == {}


def test_a_script_is_no_launcher_whatever_its_name() -> None:
    program = Program("script", "torchrun", ("--nproc-per-node", "2"))
    assert unnested(program, {}).settings == ()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("torchrun --nproc-per-node 2 --nproc_per_node 3 train.py", "2 and --nproc_per_node 3 contradict each other"),
        ("torchrun --nproc-per-node 2", "torchrun: no Python file follows; pass one, or -m MODULE"),
        ("torchrun --nnodes", "torchrun: --nnodes needs a value"),
        ("torchrun --nproc-per-node 2 none.py", "script 'none.py' does not exist"),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", "must be a number of ranks, and a multiple"),
        ("accelerate launch --num_processes x train.py", "must be a number of ranks"),
        ("accelerate launch --config_file bad.yaml train.py", "--config_file bad.yaml is no YAML"),
        ("accelerate launch --config_file list.yaml train.py", "--config_file list.yaml is no YAML mapping"),
    ],
)
def test_what_cannot_be_is_refused_by_name(line: str, text: str) -> None:
    Path("bad.yaml").write_text("a: [1")
    Path("list.yaml").write_text("[1]")
    with pytest.raises(UsageError, match=text):
        command(line)
