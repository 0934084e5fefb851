"""What the launcher loads, and what it is asked to start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from runner.config.schema import Config
from runner.journal.attempts import AttemptSpec, Job
from runner.launcher.launch_request import (
    _OF_LOOP,
    _OF_TRAINER,
    EVERYTHING,
    launch_request,
    launcher_environment,
    modules_to_preload,
    variables_set_by,
)
from runner.peers.messages import Begin, read_by_member
from runner.program.program import Program

ROOT = Path(__file__).parents[4]


def launched(
    job: Job, spec: AttemptSpec, committed_step: int = -1, config: Config | None = None, **environment: str
) -> dict[str, Any]:
    """What ranks are started with."""
    ranks: dict[str, Any] = requested(job, spec, committed_step, config, **environment)["spec"]
    return ranks


def requested(
    job: Job, spec: AttemptSpec, committed_step: int = -1, config: Config | None = None, **environment: str
) -> dict[str, Any]:
    """What the launcher is asked for."""
    directory: Any = SimpleNamespace(logs=Path("logs"), config=Path("config"), cache=Path("cache"))
    return launch_request(
        spec,
        config=config or Config(),
        directory=directory,
        job=job,
        run_id="run",
        nproc=2,
        accelerators=0,
        cold=False,
        agent_socket="agent",
        event_socket="events",
        log_dir=Path("logs/attempt-1"),
        committed_step=committed_step,
        inherited=environment,
    )


def settings_of(ranks: dict[str, Any]) -> RankSettings:
    return RankSettings.from_json(ranks["env"][SETTINGS_ENV])


def test_ranks_learn_where_to_start_from_and_whether_the_job_may_differ() -> None:
    def start(job: Job, spec: AttemptSpec) -> tuple[str, bool]:
        settings = settings_of(launched(job, spec))
        return settings.resume_from, settings.allow_changes

    assert start(Job(), AttemptSpec(1, 1)) == ("", False)
    own = Job(resume_from="/own", allow_changes=True)
    assert start(own, AttemptSpec(1, 1, resume_from="/first")) == ("/own", True)
    # Another node's ranks learn it from the first one.
    spec = AttemptSpec(1, 1, resume_from="/first", allow_changes=True)
    (begin,) = [read_by_member(Begin(spec=spec).encode())]
    assert isinstance(begin, Begin)
    assert start(Job(), begin.spec) == ("/first", True)


def test_an_attempt_reaches_the_ranks_as_one_typed_value() -> None:
    spec = AttemptSpec(3, 1, 2, "41-45,60-60", "2:90", "run", lost_steps=7, reached=70)
    config = Config.model_validate({"checkpoint": {"location": "/store", "local_tier": "/nvme"}})
    assert settings_of(launched(Job(), spec, config=config)) == RankSettings(
        agent_socket="agent",
        attempt=3,
        location="/store",
        local_tier="/nvme",
        resume="auto",
        verify="auto",
        lineage="run",
        num_failures=2,
        observed_s=90.0,
        lost_steps=7,
        reached_step=70,
        micro_batch_divisor=2,
        skipped_steps=((41, 45), (60, 60)),
    )


@pytest.mark.parametrize(
    ("attempt", "committed_step", "resume_from", "resumes"),
    [(1, -1, "", False), (2, -1, "", True), (1, 20, "", True), (2, 20, "/stock", False)],
)
def test_base_weights_are_left_out_where_all_are_restored(
    attempt: int, committed_step: int, resume_from: str, resumes: bool
) -> None:
    """A stock Trainer's checkpoint may lack some, which then were those of the base model."""
    spec = AttemptSpec(attempt, 1, resume_from=resume_from)
    assert launched(Job(), spec, committed_step)["resumes"] is resumes


def test_ranks_of_one_node_listen_on_loopback_unless_the_user_says_otherwise() -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [launched(Job(), AttemptSpec(1, 1))["env"][name] for name in names] == ["lo", "lo"]
    assert "GLOO_SOCKET_IFNAME" not in launched(Job(), AttemptSpec(1, 1), GLOO_SOCKET_IFNAME="eth0")["env"]


def test_the_launcher_inherits_the_environment_but_for_torchruns_own_variables() -> None:
    inherited = {"RANK": "3", "WORLD_SIZE": "4", "HOME": "/root", "OMP_NUM_THREADS": "7"}
    environment = launcher_environment(Config(), "run/0", ("one", "two"), inherited)
    assert environment["RUNNER_PRELOAD"] == "one two"
    assert not {"RANK", "WORLD_SIZE"} & environment.keys()
    assert (environment["HOME"], environment["OMP_NUM_THREADS"]) == ("/root", "7")
    assert launcher_environment(Config(), "run/0", (), {})["OMP_NUM_THREADS"] == "1"
    alone = Config.model_validate({"launch": {"nproc_per_node": 1}})
    assert "OMP_NUM_THREADS" not in launcher_environment(alone, "run/0", (), {})
    exact = Config.model_validate({"launch": {"nproc_per_node": 1}, "elastic": {"mode": "exact"}})
    assert launcher_environment(exact, "run/0", (), {})["OMP_NUM_THREADS"] == "1"


def choice(folder: Path, text: str, **others: str) -> tuple[str, ...]:
    for name, content in {"train": text, **others}.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return modules_to_preload(Program("script", str(folder / "train.py")))


def test_the_bundled_job_needs_everything() -> None:
    assert modules_to_preload(None) == EVERYTHING


@pytest.mark.parametrize(
    "text",
    [
        "import torch, os.path\nfrom checkpointing import CheckpointManager",
        "from torch.utils.data import DataLoader\nimport numpy as np",
        "print('transformers')  # a word is no import",
        "",
    ],
)
def test_a_bare_loop_waits_for_nothing_else(text: str, tmp_path: Path) -> None:
    assert choice(tmp_path, text) == _OF_LOOP


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import Trainer",
        "import accelerate",
        "from checkpointing.transformers import resilient",
        "from checkpointing import transformers",
        "def main():\n    import datasets",
        "try:\n    import transformers\nexcept ImportError:\n    pass",
    ],
)
def test_a_trainers_script_does_not_wait_for_trl(text: str, tmp_path: Path) -> None:
    assert choice(tmp_path, text) == _OF_TRAINER


@pytest.mark.parametrize(
    "text",
    [
        # Whatever another package may import, and change before it does.
        "import axolotl",
        "import axolotl\nfrom trl import SFTTrainer",
        "import torch, mylib.train",
        "import importlib\nimportlib.import_module('trl')",
        "__import__('trl')",
        "exec('import trl')",
        "from . import helper",
        "def f(:",
    ],
)
def test_a_doubt_loads_transformers_and_not_trl(text: str, tmp_path: Path) -> None:
    assert choice(tmp_path, text) == _OF_TRAINER


@pytest.mark.parametrize("text", ["from trl import SFTTrainer", "import trl, peft, transformers"])
def test_a_script_of_trl_does_not_wait_for_it(text: str, tmp_path: Path) -> None:
    assert choice(tmp_path, text) == EVERYTHING


def test_a_command_of_a_framework_imports_trl_by_itself(tmp_path: Path) -> None:
    """LLaMA-Factory changes what transformers says of other packages before it imports TRL."""
    assert modules_to_preload(Program("command", "/venv/bin/llamafactory-cli", ("train", "job.yaml"))) == _OF_TRAINER


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import os\nos.environ['HF_HOME'] = '/cache'\nimport transformers", ["HF_HOME"]),
        (
            'import os\nos.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": "x"})\nimport trl',
            ["HF_DATASETS_CACHE", "HF_HUB_OFFLINE"],
        ),
        ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\nimport transformers", []),
        ("import os, transformers\nos.environ['MY_HOME'] = 'x'", []),
        ("import transformers\nprint('HF_HOME')", []),
        ("def f(:", []),
    ],
)
def test_variables_that_a_script_sets_before_imports_have_their_effect(
    text: str, names: list[str], tmp_path: Path
) -> None:
    """What was imported before the script has read them."""
    chosen = choice(tmp_path, text)
    assert variables_set_by(Program("script", str(tmp_path / "train.py"))) == names
    assert (chosen == _OF_LOOP) == bool(names)


def test_files_in_the_scripts_folder_are_read_too(tmp_path: Path) -> None:
    helper = "from helper import build\nimport package.part"
    assert (
        choice(tmp_path, helper, helper="import torch", package__in____init__="", package__in__part="import os")
        == _OF_LOOP
    )
    assert choice(tmp_path, helper, helper="import torch", package__in__part="import trl") == EVERYTHING
    assert choice(tmp_path, helper, helper="import transformers", package__in__part="") == _OF_TRAINER
    assert choice(tmp_path, helper, helper="import train", package__in__part="") == _OF_LOOP, "a circle"
    assert choice(tmp_path, helper, helper="def f(:", package__in__part="") == _OF_TRAINER


def test_a_script_that_cannot_be_read_is_no_error_here(tmp_path: Path) -> None:
    assert modules_to_preload(Program("script", str(tmp_path / "none.py"))) == _OF_TRAINER
    (tmp_path / "latin.py").write_bytes(b"name = '\xff'")
    assert modules_to_preload(Program("script", str(tmp_path / "latin.py"))) == _OF_TRAINER


def test_the_examples_start_fast() -> None:
    assert modules_to_preload(Program("script", str(ROOT / "docs" / "examples" / "loop.py"))) == _OF_LOOP
    assert modules_to_preload(Program("script", str(ROOT / "docs" / "examples" / "hf_trainer.py"))) == _OF_TRAINER


def meeting(spec: AttemptSpec, **launch: object) -> dict[str, Any]:
    config = Config.model_validate({"launch": {"nnodes": 3, "rdzv_endpoint": "node0:29500", **launch}})
    found: dict[str, Any] = requested(Job(), spec, config=config)["meeting"]
    return found


def test_each_node_is_given_its_place_and_the_address_of_the_leader() -> None:
    """torchrun finds that out again, from what nodes, and strangers, write to a store."""
    of_three = AttemptSpec(2, 3, nodes=(0, 1, 2), max_nodes=3)
    found = [meeting(of_three, node_rank=rank) for rank in range(3)]
    assert [one["place"] for one in found] == [0, 1, 2] and [one["is_host"] for one in found] == [True, False, False]
    assert {(one["host"], one["port"], one["bind"], one["nnodes"]) for one in found} == {("node0", 29500, None, 3)}


def test_the_places_of_those_that_are_left_have_no_gap() -> None:
    two = AttemptSpec(4, 2, nodes=(2, 1), max_nodes=3, leader=2, leader_host="10.0.0.7")
    first, second = (meeting(two, node_rank=rank, peer_bind="10.0.0.5", min_nodes=1) for rank in (1, 2))
    assert (first["place"], first["is_host"], second["place"], second["is_host"]) == (0, False, 1, True)
    assert second["host"] == second["bind"] == "10.0.0.7"


def test_a_run_of_one_node_meets_on_loopback_whatever_the_endpoint() -> None:
    found = meeting(AttemptSpec(1, 1), nnodes=1)
    assert (found["host"], found["bind"], found["port"], found["place"]) == ("127.0.0.1", "127.0.0.1", 0, 0)


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({}, {}),
        ({"snapshot_steps": 3}, {"snapshot_steps": 3}),
        ({"snapshot_steps": None, "save_steps": None, "save_minutes": None}, {"snapshot_steps": None}),
        ({"save_steps": "auto", "save_minutes": 5, "overhead_cap": 0.02},
         {"save_steps": "auto", "save_minutes": 5.0, "overhead_cap": 0.02}),
    ],
)  # fmt: skip
def test_intervals_that_the_user_has_set_reach_a_program(
    checkpoint: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """`checkpoint.snapshot_steps` was ignored with a script."""
    config = Config.model_validate({"checkpoint": checkpoint})
    script = Job(Program("script", str(tmp_path / "train.py")))
    assert settings_of(launched(script, AttemptSpec(1, 1), config=config)).cadence == expected
    assert settings_of(launched(Job(), AttemptSpec(1, 1), config=config)).cadence == {}
