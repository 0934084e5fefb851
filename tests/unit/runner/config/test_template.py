from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from runner.config.load import load_config
from runner.config.schema import DEFAULT_CONFIG, Config
from runner.config.template import job_template

TEXT = job_template("../job.schema.json", "job.yaml")


def uncommented(text: str) -> str:
    """The text as an editor leaves it that uncomments all sections: the comments inside of them stay."""
    body = text.partition("\n\n")[2]
    return re.sub(r"^# ((?: |\w+:).*)$", r"\1", body, flags=re.MULTILINE)


def test_the_first_line_names_the_schema() -> None:
    assert TEXT.splitlines()[0] == "# yaml-language-server: $schema=../job.schema.json"


def test_it_is_the_bundled_job() -> None:
    written, bundled = yaml.safe_load(TEXT), yaml.safe_load(DEFAULT_CONFIG.read_text())
    assert written == {key: value for key, value in bundled.items() if key != "output_dir"}


def test_it_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TEXT)
    config = load_config(str(path), {})
    assert config.output_dir == "runs/job"
    assert config.model == load_config(None, {}).model


@pytest.mark.parametrize("key", list(Config.model_fields))
def test_every_key_is_in_it_with_a_comment(key: str) -> None:
    assert re.search(rf"^# [A-Z].*\n(# .*\n)*(# )?{key}:", TEXT, re.MULTILINE)
    for inner in getattr(Config.model_fields[key].annotation, "model_fields", {}):
        assert re.search(rf"^#? +# [A-Z].*\n(#? +# .*\n)*#? +(# )?{inner}:", TEXT, re.MULTILINE), inner


def test_to_uncomment_its_sections_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TEXT)
    config = load_config(str(path), {})
    path.write_text(uncommented(TEXT))
    assert set(yaml.safe_load(path.read_text())) == set(Config.model_fields)
    assert load_config(str(path), {}) == config


def test_its_lines_are_short() -> None:
    assert max(map(len, TEXT.splitlines())) <= 110
