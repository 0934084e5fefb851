"""Which variables set which key, and which of two names counts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.load import (
    CONFIG_VARIABLES,
    load_config,
    load_recorded,
    parse_setting,
    settings_from_environment,
)
from runner.config.schema import Config
from runner.errors import UsageError
from runner.program.program import Program


def test_variables_that_are_unset_or_empty_set_nothing() -> None:
    assert settings_from_environment({"EPOCHS": "", "UNRELATED": "1"}) == {}
    assert settings_from_environment({"EPOCHS": "3"}) == {"trainer.num_train_epochs": ("3", "EPOCHS")}


@pytest.mark.parametrize(
    ("variable", "torchruns", "key"),
    [
        ("MASTER_ADDR", "PET_MASTER_ADDR", "launch.master_addr"),
        ("MASTER_PORT", "PET_MASTER_PORT", "launch.master_port"),
        ("RANK", "PET_NODE_RANK", "launch.node_rank"),
        ("AWS_BATCH_JOB_NUM_NODES", "PET_NNODES", "launch.nnodes"),
    ],
)
def test_torchruns_own_names_take_precedence(variable: str, torchruns: str, key: str) -> None:
    both = {torchruns: "1", variable: "2"}
    assert settings_from_environment(both)[key] == ("1", torchruns)
    assert settings_from_environment({**both, torchruns: ""})[key] == ("2", variable)


@pytest.mark.parametrize("key", sorted(set(CONFIG_VARIABLES.values())))
def test_every_variable_sets_a_key_that_exists(key: str) -> None:
    section, _, name = key.partition(".")
    value = getattr(Config(), section)
    # The options of `trainer` are those of SFTConfig, which checks them itself.
    assert not name or section == "trainer" or hasattr(value, name)


def test_a_script_needs_no_package_that_it_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which options a Trainer has is asked where some are given."""
    find: Callable[..., Any] = importlib.util.find_spec

    def missing(name: str, package: str | None = None) -> Any:
        return None if name in ("transformers", "trl") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert load_config(None, {}, program=Program("script", "/x/train.py")).trainer == {}


def test_a_settings_value_is_taken_as_it_is() -> None:
    """A line break became a space, so that checkpoints went to another folder."""
    assert parse_setting("checkpoint.location=/tmp/a\nb")[1] == "/tmp/a\nb"
    assert parse_setting("model.config={a: 1,\n b: 2}")[1] == {"a": 1, "b": 2}
    assert parse_setting("checkpoint.snapshot_steps=8\n")[1] == 8
    assert parse_setting("data.columns=\n  - a\n  - b\n")[1] == ["a", "b"]
    assert parse_setting("checkpoint.location=/tmp/é")[1] == "/tmp/é"
    with pytest.raises(UsageError, match="no UTF-8"):
        parse_setting("checkpoint.location=/tmp/\udcff")


def test_a_home_folder_is_expanded_where_no_shell_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the name ~ was made in the working directory."""
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(None, {}, [parse_setting(f"{key}=~/x") for key in ("checkpoint.location", "output_dir")])
    assert (config.checkpoint_location, config.output_dir) == ("/home/me/x", "/home/me/x")


def test_a_configuration_that_an_earlier_version_recorded_is_read() -> None:
    """It names every key, with its default then."""
    config = load_config(None, {}, [parse_setting("monitoring.address=null")])
    assert config.monitoring.address == "127.0.0.1"


def test_what_an_earlier_version_recorded_is_read(tmp_path: Path) -> None:
    recorded, file = Config(output_dir="/data/run"), tmp_path / "config.yaml"
    recorded.checkpoint.location = "s3://bucket/run"
    file.write_text(
        recorded.to_yaml()
        .replace("rdzv_backend: c10d", "rdzv_backend: etcd-v2\n  rdzv_conf: {a: 1}")
        .replace("strategy: ddp", "strategy: {gone: 2}")
        + "gone: true\n"
    )
    assert "etcd-v2" in file.read_text() and "{gone: 2}" in file.read_text()
    assert load_recorded(file) == recorded


@pytest.mark.parametrize("text", ["[]", "a: [", None])
def test_what_is_no_record_is_refused(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=r"config\.yaml"):
        load_recorded(file)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("notify.url=ftp://host/t0ken", "notify.url=... is not allowed: write https://HOST/PATH"),
        ("notify.url=https://user:t0ken@host/", "without user and password"),
        ("notify.url=https://host:99999/t0ken", "write https://HOST/PATH"),
        ("notify.url=[t0ken]", "notify.url=... is not allowed"),
        ("notify={address: https://host/t0ken}", "unknown key notify.address (value ...); use one of url, format"),
        ("notify=t0ken", "notify=... is not allowed: use a mapping"),
        ("notify.events=[t0ken]", "notify.events=... is not allowed: use a list of failed, stuck"),
    ],
)
def test_a_webhooks_address_is_never_repeated(setting: str, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)) as raised:
        load_config(None, {}, [parse_setting(setting)])
    assert "t0ken" not in str(raised.value)


def test_a_webhooks_address_is_not_recorded() -> None:
    config = load_config(None, {"RUNNER_NOTIFY_URL": "https://host/t0ken"})
    assert config.notify.url is not None and config.notify.url.get_secret_value() == "https://host/t0ken"
    assert "t0ken" not in config.to_yaml() + repr(config)
    assert Config.model_validate(yaml.safe_load(config.to_yaml())).notify.url is None
