from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from checkpointing.commit.retention import Retention
from runner.config import trainer_options
from runner.config.load import load_config, parse_setting
from runner.config.schema import DEFAULT_CONFIG, CheckpointConfig, ModelConfig, Section
from runner.errors import UsageError
from runner.program.program import Program


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return str(path)


# A model, for what says nothing of it.
MODEL = "model: {name_or_path: org/model}\n"


def test_precedence_is_defaults_yaml_environment_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "trainer: {learning_rate: 1e-5, num_train_epochs: 2}\noutput_dir: from-yaml\n")
    environment = {"LEARNING_RATE": "2e-5", "EPOCHS": "7", "BATCH_SIZE": "28", "UNRELATED": "x"}
    config = load_config(path, environment, [parse_setting("trainer.learning_rate=3e-5")])
    assert config.trainer == {"learning_rate": 3e-5, "num_train_epochs": 7.0, "per_device_train_batch_size": 28}
    assert config.output_dir == "from-yaml"
    assert config.launch.master_port == 29500
    assert load_config(path, environment).trainer["learning_rate"] == 2e-5
    assert load_config(path, {}).trainer["learning_rate"] == 1e-5


@pytest.mark.parametrize("name", ["./missing", "/nowhere/model", "~/model", "a/b/c"])
def test_a_models_folder_that_is_missing_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(
        UsageError, match=re.escape(f"model.name_or_path={name!r} does not exist; give a model's folder")
    ):
        load_config(None, {}, [("model.name_or_path", name, "--set")])
    assert load_config(None, {}, [("model.name_or_path", "org/model", "--set")]).model.name_or_path == "org/model"


def test_a_folder_that_is_missing_in_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both were looked for on the Hub, for a minute."""
    monkeypatch.chdir(tmp_path)
    for folder in ("models", "data"):
        Path(folder).mkdir()
    given = {"model.name_or_path": "org/model", "data.path": "org/data"}
    load_config(None, {}, [(key, name, "--set") for key, name in given.items()])
    for wrong, folder in (("model.name_or_path", "models/llama"), ("data.path", "data/train")):
        settings = [(key, name, "--set") for key, name in {**given, wrong: folder}.items()]
        with pytest.raises(UsageError, match=rf"{wrong}='{folder}' does not exist"):
            load_config(None, {}, settings)
        Path(folder).mkdir()
        load_config(None, {}, settings)


def test_an_empty_output_dir_is_refused() -> None:
    """It was the current directory, into which a run wrote its folders."""
    with pytest.raises(UsageError, match="output_dir='' is not allowed"):
        load_config(None, {}, [("output_dir", "", "--output-dir")])
    with pytest.raises(UsageError, match="output_dir='  ' is not allowed"):
        load_config(None, {}, [("output_dir", "  ", "--output-dir")])


def test_reference_variables() -> None:
    config = load_config(
        None,
        {
            "OUTPUT_DIR": "/models",
            "AIM_REPO": "/aim",
            "MASTER_ADDR": "master-0",
            "MASTER_PORT": "23456",
            "WORLD_SIZE": "2",
            "RANK": "1",
        },
    )
    assert (config.output_dir, config.tracking.aim_repo) == ("/models", "/aim")
    launch = config.launch
    assert (launch.master_addr, launch.master_port, launch.world_size, launch.node_rank) == ("master-0", 23456, 2, 1)


@pytest.mark.parametrize(
    ("yaml_text", "settings", "parts"),
    [
        ("outptu_dir: x", [], ["job.yaml", "outptu_dir", "'x'", "output_dir, scale_learning_rate"]),
        ("model: {nme: x}", [], ["model.nme", "'x'", "name_or_path"]),
        ("trainer: {lerning_rate: 1}", [], ["trainer.lerning_rate=1", "did you mean learning_rate"]),
        ("trainer: {seed: many}", [], ["trainer.seed='many'", "use a whole number"]),
        ("trainer: {bf16: 7}", [], ["trainer.bf16=7", "use true or false"]),
        ("trainer: {output_dir: x}", [], ["trainer.output_dir", "top-level output_dir"]),
        ("launch: {nnodes: 0}", [], ["launch.nnodes=0", "use a whole number from 1"]),
        ("launch: {nproc_per_node: 0}", [], ["launch.nproc_per_node=0", "auto"]),
        ("launch: {nproc_per_node: many}", [], ["launch.nproc_per_node='many'"]),
        ("data: {path: missing.parquet}", [], ["data.path='missing.parquet'", "does not exist"]),
        ("checkpoint: {location: 'no://host/x'}", [], ["checkpoint.location 'no://host/x'", "use a path, file://"]),
        ("restart: {preemption_notices: ibm}", [], ["restart.preemption_notices='ibm'", "use off, aws, gcp or azure"]),
        ("restart: {preemption_notices: true}", [], ["restart.preemption_notices=True", "use off, aws, gcp or azure"]),
        ("restart: {metadata_endpoint: 'localhost:80'}", [], ["metadata_endpoint='localhost:80'", "http://host:port"]),
        ("restart: {metadata_endpoint: 'https://host'}", [], ["metadata_endpoint='https://host'", "http://host:port"]),
        ("restart: {metadata_endpoint: 'http://host/v1'}", [], ["metadata_endpoint=", "http://host:port"]),
        ("restart: {metadata_endpoint: 'http://host:99999'}", [], ["metadata_endpoint=", "Port out of range"]),
        ("launch: [1, 2]", [], ["launch=[1, 2]", "use a mapping"]),
        ("trainer: 3", [], ["trainer=3", "use a mapping"]),
        ("- a\n- b", [], ["job.yaml", "mapping"]),
        ("a: [", [], ["job.yaml", "not valid YAML"]),
        ("", [("trainer.seed", "x", "--set trainer.seed=x")], ["command line --set trainer.seed=x", "'x'"]),
        ("output_dir: x", [("output_dir.deep", 1, "--set output_dir.deep=1")], ["--set", "not a section"]),
    ],
)
def test_mistakes_are_one_line_with_key_value_and_fix(
    yaml_text: str, settings: list[tuple[str, object, str]], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        load_config(write(tmp_path, yaml_text), {}, settings)
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_a_section_without_keys_is_the_default(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MODEL + "monitoring:\n  # port: 9400\ntrainer:\n"), {})
    assert (config.monitoring.port, config.trainer) == (None, {})


def test_environment_mistakes_name_the_variable() -> None:
    with pytest.raises(
        UsageError, match=r"environment variable BATCH_SIZE: trainer\.per_device_train_batch_size='big'"
    ):
        load_config(None, {"BATCH_SIZE": "big"})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"--config nowhere.yaml: No such file"):
        load_config("nowhere.yaml", {})


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(None, {"EPOCHS": "3"})
    assert load_config(write(tmp_path, config.to_yaml()), {}) == config


@pytest.mark.parametrize("path", [DEFAULT_CONFIG, *Path("deploy/configs").glob("*.yaml")], ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path: Path) -> None:
    options = yaml.safe_load(path.read_text())["trainer"]
    # Another name at most, with older libraries.
    assert list(load_config(str(path), {}).trainer.values()) == list(options.values())


def test_the_option_names_are_exactly_those_of_sftconfig() -> None:
    import dataclasses

    from trl import SFTConfig

    assert set(trainer_options.fields()) >= {field.name for field in dataclasses.fields(SFTConfig) if field.init}
    assert set(trainer_options.RESERVED) - {"overwrite_output_dir", "local_rank"} <= set(trainer_options.fields())


def test_preemption_notices_are_off_as_yaml_writes_it(tmp_path: Path) -> None:
    config = load_config(None, {}, [parse_setting("restart.preemption_notices=off")])
    assert config.restart.preemption_notices == "off"
    again = load_config(write(tmp_path, config.to_yaml()), {})
    assert again.restart.preemption_notices == "off"
    endpoint = parse_setting("restart.metadata_endpoint=http://127.0.0.1:8080")
    config = load_config(None, {}, [parse_setting("restart.preemption_notices=aws"), endpoint])
    assert config.restart.preemption_notices == "aws"
    assert config.restart.metadata_endpoint == "http://127.0.0.1:8080"


def test_a_strategy_of_no_is_no_boolean() -> None:
    """YAML reads an unquoted no as false."""
    config = load_config(
        None, {}, [parse_setting("trainer.save_strategy=no"), parse_setting("trainer.eval_strategy=no")]
    )
    assert (config.trainer["save_strategy"], config.trainer["eval_strategy"]) == ("no", "no")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["data.validation_split=test"], "data.validation_split='test' is a split of a hub data set, and the bundled"),
        (["data.path=s3://b/x.jsonl", "data.validation_split=test"], "s3://b/x.jsonl has none"),
        (["data.path=org/set", "data.validation_split=test", "data.validation_share=0.1"], "choose one"),
        (["data.validation_path=s3://b/y.csv", "data.validation_share=0.1"], "choose one"),
        (["data.validation_path=nothing.csv"], "data.validation_path='nothing.csv' does not exist"),
        (["data.validation_share=1.5"], "data.validation_share=1.5 is not allowed"),
        (["method.type=lora2"], "method.type='lora2' is not allowed"),
        (["trainer.metric_for_best_model=eval_perplexity"], "metric_for_best_model='eval_perplexity' is not allowed"),
        (["guards.spike_zscore=-1"], "guards.spike_zscore=-1 is not allowed"),
    ],
)
def test_what_cannot_be_evaluated_or_trained_is_told(settings: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        load_config(None, {}, [parse_setting(text) for text in settings])


def test_a_hub_set_may_have_a_split_for_evaluations() -> None:
    settings = ["model.name_or_path=org/model", "data.path=org/set", "data.validation_split=test"]
    config = load_config(None, {}, [parse_setting(text) for text in settings])
    assert config.data.has_validation


@pytest.mark.parametrize(
    ("settings", "environment", "program"),
    [
        (["model.name_or_path=org/model"], {}, None),
        (["model={name_or_path: org/model}"], {}, None),
        ([], {"MODEL_NAME": "org/model"}, None),
        (["data.path=org/set", "model.config={hidden_size: 8}"], {}, None),
        ([], {}, Program("script", "train.py")),
    ],
)
def test_naming_a_model_data_or_script_leaves_nothing_of_the_bundled_job(
    settings: list[str], environment: dict[str, str], program: Program | None
) -> None:
    config = load_config(None, environment, [parse_setting(text) for text in settings], program=program)
    assert config.trainer == {} and "num_hidden_layers" not in config.model.config
    assert config.model.vocab_size == ModelConfig().vocab_size


def test_other_settings_change_the_bundled_job() -> None:
    settings = ["data.max_rows=9", "model.name_or_path=null", "model.config={hidden_size: 64}", "method.type=lora"]
    config = load_config(None, {"EPOCHS": "1"}, [parse_setting(text) for text in settings])
    assert config.trainer["save_steps"] == 20 and config.model.config == {"hidden_size": 64}


@pytest.mark.parametrize(("text", "settings"), [("trainer: {bf16: true}", []), (None, ["data.path=org/set"])])
def test_a_job_without_a_model_is_refused(text: str | None, settings: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, text) if text is not None else None
    overrides = [parse_setting(setting) for setting in settings]
    with pytest.raises(UsageError, match=r"no model is configured; set model\.name_or_path \(variable MODEL_NAME\)"):
        load_config(path, {}, overrides)
    # A run that exists is only looked at; a script brings its own model.
    load_config(path, {}, overrides, needs_data=False)
    load_config(path, {}, overrides, program=Program("script", "train.py"))


@pytest.mark.parametrize(
    ("path", "settings", "program", "folder"),
    [
        (None, [], None, "runs/default"),
        (str(DEFAULT_CONFIG), [], None, "runs/default"),
        ("qwen2.5-7b.yaml", [], None, "runs/qwen2.5-7b"),
        ("job.yaml", [], Program("script", "some/where/train.py"), "runs/train"),
        (None, [], Program("script", "train.py"), "runs/train"),
        (None, [], Program("module", "package.train"), "runs/package-train"),
        (None, [], Program("command", "/venv/bin/llamafactory-cli"), "runs/llamafactory-cli"),
        (None, ["model.name_or_path=Qwen/Qwen2.5-7B"], None, "runs/Qwen2.5-7B"),
        (None, ["model.config={hidden_size: 8}", "data.path=org/set"], None, "runs/set"),
        (None, ["output_dir=elsewhere"], Program("script", "train.py"), "elsewhere"),
    ],
)
def test_the_default_folder_is_named_after_the_job(
    path: str | None, settings: list[str], program: Program | None, folder: str, tmp_path: Path
) -> None:
    if path is not None and not Path(path).is_absolute():
        path = str(tmp_path / path)
        Path(path).write_text(MODEL)
    config = load_config(path, {}, [parse_setting(text) for text in settings], program=program)
    assert config.output_dir == folder


def test_an_option_by_its_new_name_means_the_old_one_of_an_older_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_options, "fields", lambda: {"gradient_checkpointing": bool})
    options = {"activation_checkpointing": False}
    assert trainer_options.validate(options, str) == {"gradient_checkpointing": False}
    monkeypatch.setattr(trainer_options, "fields", lambda: {"activation_checkpointing": bool})
    assert trainer_options.validate(options, str) == options


def test_what_is_kept_is_one_value_for_each_tier() -> None:
    checkpoint = CheckpointConfig(keep_every_steps=50, keep_best=2, local_keep_last=3)
    further = {"keep_every": 50, "keep_best": 2}
    assert (checkpoint.further_retention, checkpoint.local_retention) == (further, Retention(keep_last=3))


@pytest.mark.parametrize("written", ["1:3", "launch.nnodes", "--set", "quoted", "pair"])
def test_a_range_of_nodes_as_torchrun_writes_it(written: str, tmp_path: Path) -> None:
    """YAML 1.1 reads 1:3 as 63."""
    path, settings, environment = None, [], {}
    if written == "1:3":
        settings = [("launch.nnodes", "1:3", "--nnodes 1:3")]
    elif written == "launch.nnodes":
        environment = {"PET_NNODES": "1:3"}
    elif written == "--set":
        settings = [parse_setting("launch.nnodes=1:3")]
    else:
        path = tmp_path / "job.yaml"
        value = {"quoted": 'nnodes: "1:3"', "pair": "{nnodes: 3, min_nodes: 1}"}[written]
        text = DEFAULT_CONFIG.read_text()
        path.write_text(f"{text}\nlaunch: {value}\n" if written == "pair" else f"{text}\nlaunch:\n  {value}\n")
    launch = load_config(str(path) if path else None, environment, settings).launch
    assert (launch.min_nodes, launch.nnodes) == (1, 3)


def test_numbers_of_yaml_are_what_they_were() -> None:
    values = {text: parse_setting(f"a={text}")[1] for text in ("12", "-3", "0x1f", "017", "0", "1_000", "1e-4", "1.5")}
    assert values == {"12": 12, "-3": -3, "0x1f": 31, "017": 15, "0": 0, "1_000": 1000, "1e-4": "1e-4", "1.5": 1.5}


@pytest.mark.parametrize("nnodes", ["3:1", "0:2", "1:", ":3", "a:b", "1:2:3"])
def test_a_range_that_is_none_is_refused(nnodes: str) -> None:
    with pytest.raises(UsageError, match=r"launch\.(nnodes|min_nodes)"):
        load_config(None, {}, [("launch.nnodes", nnodes, f"--nnodes {nnodes}")])


class Own(Section):
    rate: float = 1.0
    """How fast."""


def test_unknown_keys_and_numbers_that_are_none_are_errors_and_docstrings_describe_keys() -> None:
    assert Own.model_json_schema()["properties"]["rate"]["description"] == "How fast."
    for wrong in ({"rats": 1.0}, {"rate": float("nan")}):
        with pytest.raises(ValidationError):
            Own.model_validate(wrong)
