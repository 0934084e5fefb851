"""The options of `runner chaos`, with a campaign that only records what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from runner.chaos import campaign as campaign_module
from runner.chaos import node_campaign as node_campaign_module
from runner.chaos.faults import FAULTS
from runner.chaos.run_under_test import JobUnderTest
from runner.chaos.verdict import Result as Verdict
from runner.cli.chaos import chaos
from runner.errors import UsageError


class Campaigns(list[dict[str, Any]]):
    """In place of `Campaign`: what was asked for, and one verdict for all."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict = Verdict(runs=1, identical=1)

    def __call__(self, folder: Path, job: JobUnderTest, **details: Any) -> Campaigns:
        self.append({"folder": folder, "job": job, **details})
        return self

    def run(self, num_faults: int, *, seconds: float | None, keep: bool) -> Verdict:
        self[-1] |= {"num_faults": num_faults, "seconds": seconds, "keep": keep}
        return self.verdict


@pytest.fixture
def campaigns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Campaigns:
    made = Campaigns()
    monkeypatch.setattr(campaign_module, "Campaign", made)
    monkeypatch.chdir(tmp_path)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(chaos, list(arguments))


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, UsageError), result
    return str(result.exception)


def test_a_campaign_by_default(campaigns: Campaigns) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    [asked] = campaigns
    assert (asked["num_faults"], asked["seconds"], asked["keep"], asked["tolerance"]) == (20, None, False, None)
    assert [fault.name for fault in asked["faults"]] == [fault.name for fault in FAULTS]
    assert asked["job"] == JobUnderTest(["--config", str(asked["folder"] / "job.yaml")])
    assert f"runner chaos: seed {asked['seed']}, in {asked['folder']}" in result.output
    assert asked["folder"].name.endswith(f"-seed-{asked['seed']}")


def test_options_reach_the_campaign(campaigns: Campaigns, tmp_path: Path) -> None:
    options = ["--kills", "3", "--minutes", "2", "--seed", "7", "--tolerance", "0.5", "--keep", "--output-dir", "here"]
    assert run(*options, "--fault", "rank killed", "--fault", "agent killed").exit_code == 0
    [asked] = campaigns
    assert (asked["num_faults"], asked["seconds"], asked["seed"]) == (3, 120.0, 7)
    assert (asked["tolerance"], asked["keep"], asked["folder"]) == (0.5, True, tmp_path / "here")
    assert [fault.name for fault in asked["faults"]] == ["rank killed", "agent killed"]


def test_of_a_program_the_first_steps_are_run(campaigns: Campaigns, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert run("--nproc-per-node", "3", "train.py", "--lr", "1").exit_code == 0
    assert run("--steps", "40", "--output-dir", "b", "-m", "json.tool", "--help").exit_code == 0
    script, module = (asked["job"] for asked in campaigns)
    assert script.program == [str(tmp_path / "train.py"), "--lr", "1"]
    assert script.length == (100, 10)
    assert module.program == ["-m", "json.tool", "--help"] and module.length == (40, 4)
    job = yaml.safe_load((campaigns[0]["folder"] / "job.yaml").read_text())
    assert job["launch"]["nproc_per_node"] == 3


@pytest.mark.parametrize(("flag", "expected"), [([], None), (["--deterministic"], True)])
def test_the_job_is_written_for_the_runs(flag: list[str], expected: bool | None, campaigns: Campaigns) -> None:
    assert run(*flag, "--set", "trainer.max_steps=7").exit_code == 0
    job = yaml.safe_load((campaigns[0]["folder"] / "job.yaml").read_text())
    assert job["trainer"]["max_steps"] == 7 and job["trainer"].get("full_determinism") is expected


def test_kinds_of_faults_are_listed_and_nothing_is_run(campaigns: Campaigns) -> None:
    assert run("--list").output.splitlines() == [fault.name for fault in FAULTS]
    assert campaigns == []


def test_mistakes_are_found_before_anything_runs(campaigns: Campaigns, tmp_path: Path) -> None:
    assert "--fault 'rank kiled' is unknown" in refused("--fault", "rank kiled")
    assert "pass a configuration file as --config a.yaml" in refused("a.yaml")
    assert "takes --set trainer.max_steps=N" in refused("--steps", "30")
    assert "sets its own algorithms" in refused("--deterministic", "-m", "json.tool")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert f"--output-dir {tmp_path / 'full'} is not empty" in refused("--output-dir", "full")
    assert run("--kills", "0").exit_code == 2 and run("--tolerance", "nan").exit_code == 2
    assert campaigns == []


def test_the_verdict_is_written_and_decides_the_exit_code(campaigns: Campaigns, tmp_path: Path) -> None:
    assert run("--seed", "7", "--json", "good.json", "--output-dir", "good").exit_code == 0
    campaigns.verdict = Verdict(runs=1, identical=0, differences=["run 1: weight differs"])
    result = run("--seed", "7", "--json", "bad.json", "--output-dir", "bad")
    assert result.exit_code == 1 and "--seed 7 draws the same faults again" in result.output
    verdicts = [json.loads((tmp_path / name).read_text()) for name in ("good.json", "bad.json")]
    assert [verdict["identical"] for verdict in verdicts] == [True, False]


@pytest.mark.parametrize(("nnodes", "fewest"), [((), 1), (("--nnodes", "3"), 3), (("--nnodes", "2:3"), 2)])
def test_how_few_nodes_train(
    nnodes: tuple[str, ...], fewest: int, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_campaign_module, "NodeCampaign", campaigns)
    assert run("--nodes", "3", *nnodes, "--output-dir", "run").exit_code == 0
    [asked] = campaigns
    assert (asked["num_nodes"], asked["fewest"]) == (3, fewest)
    # The job itself is of one node until the campaign starts its nodes.
    launch = yaml.safe_load((asked["folder"] / "job.yaml").read_text()).get("launch", {})
    assert launch.get("nnodes", 1) == 1 and launch.get("min_nodes") is None


@pytest.mark.parametrize("nnodes", ["2", "1:4", "many"])
def test_nodes_of_another_number_are_refused(nnodes: str, campaigns: Campaigns) -> None:
    assert f"--nnodes {nnodes} is not of --nodes 3" in refused("--nodes", "3", "--nnodes", nnodes)
    assert campaigns == []
