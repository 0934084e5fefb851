from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from runner.cli.main import cli


def options(command: click.Command) -> Iterator[click.Option]:
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from options(child)
    yield from (param for param in command.params if isinstance(param, click.Option))


def test_every_option_has_a_help_text() -> None:
    for option in options(cli):
        text = option.help or ""
        assert text[:1].isupper() and text.endswith("."), (option.opts, text)


def test_torchruns_spelling_of_options_is_accepted() -> None:
    result = CliRunner().invoke(cli, ["config", "--nproc_per_node", "3", "--nnodes", "2", "--node_rank=1"])
    assert result.exit_code == 0, result.output
    launch = yaml.safe_load(result.output)["launch"]
    assert (launch["nproc_per_node"], launch["nnodes"], launch["node_rank"]) == (3, 2, 1)


def test_options_of_a_script_keep_their_spelling() -> None:
    arguments = ["--max_restarts", "1", "train.py", "--my_option", "a_b"]
    with (
        cli.make_context("runner", ["start"]) as parent,
        cli.commands["start"].make_context("start", arguments, parent=parent) as context,
    ):
        assert context.params["max_restarts"] == 1
        assert (context.params["program"], context.params["args"]) == ("train.py", ("--my_option", "a_b"))


def test_the_former_name_of_nnodes_is_accepted_by_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    class Made:
        def to_dict(self) -> dict[str, Any]:
            return {}

    def make_plan(config: Any, assumptions: Any, **_: Any) -> Made:
        planned.append(config.launch.nnodes)
        return Made()

    monkeypatch.setattr("runner.plan.plan.make_plan", make_plan)
    result = CliRunner().invoke(cli, ["plan", "--machines", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert planned == [2]
    assert "--machines" not in CliRunner().invoke(cli, ["plan", "--help"]).output
