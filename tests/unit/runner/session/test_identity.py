"""What makes a job the same job, and what may change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.config.schema import Config, DataConfig, MethodConfig, ModelConfig
from runner.errors import UsageError
from runner.program.program import Program
from runner.session import identity
from runner.session.identity import (
    CHANGEABLE_OPTIONS,
    JobIdentity,
    between_nodes,
    differences,
    digest_of_file,
    identify,
    parse_arguments,
    summarised,
)


def job(**parts: object) -> Config:
    return Config.model_validate({"model": {"name_or_path": "org/model"}, **parts})


def changes(old: Config, new: Config) -> list[str]:
    return differences(identify(old), identify(new))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({}, {"model": {"name_or_path": "org/other"}}, ["model.name_or_path: org/model -> org/other"]),
        ({}, {"method": {"type": "lora"}}, ["method.type: (not given) -> lora"]),
        ({}, {"data": {"path": "org/set"}}, ["data.path: the bundled data -> org/set"]),
        ({"data": {"path": "a/b"}}, {"data": {"path": "a/b", "split": "x"}}, ["data.split: (not given) -> x"]),
        ({"trainer": {"seed": 1}}, {"trainer": {"seed": 2}}, ["trainer.seed: 1 -> 2"]),
        ({}, {"trainer": {"learning_rate": 1e-4}}, ["trainer.learning_rate: (not given) -> 0.0001"]),
        ({}, {"scale_learning_rate": False}, ["scale_learning_rate: true -> false"]),
        (
            {"model": {"config": {"hidden_size": 8}}},
            {"model": {"config": {"hidden_size": 9}}},
            ["model.config.hidden_size: 8 -> 9"],
        ),
    ],
)
def test_another_job_is_named_by_what_differs(old: dict[str, object], new: dict[str, object], told: list[str]) -> None:
    assert changes(job(**old), job(**new)) == told


def test_what_may_change_is_no_other_job() -> None:
    trainer = {
        "max_steps": 9,
        "num_train_epochs": 4,
        "warmup_steps": 3,
        "save_steps": 5,
        "save_total_limit": 1,
        "eval_steps": 5,
        "logging_steps": 1,
        "report_to": "tensorboard",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "dataloader_num_workers": 2,
    }
    assert trainer.keys() <= CHANGEABLE_OPTIONS
    other = job(
        output_dir="elsewhere",
        strategy="fsdp",
        trainer=trainer,
        checkpoint={"location": "s3://b/p", "save_minutes": 5},
        launch={"nproc_per_node": 8, "nnodes": 2},
        restart={"max_restarts": 9},
        guards={"spike_zscore": 8},
        tracking={"aim_repo": "/aim"},
        monitoring={"port": 9000},
        cost={"price_per_hour": 1},
    )
    assert changes(job(), other) == []
    # But how far it runs is not the same.
    assert identify(other).settings["trainer.max_steps"] == 9 and identify(job()).settings == {}


def test_defaults_of_a_later_version_are_no_other_job() -> None:
    explicit = job(method=MethodConfig().model_dump(), data=DataConfig().model_dump())
    explicit.model = ModelConfig(name_or_path="org/model", attn_implementation="auto")
    assert identify(explicit) == identify(job())
    assert set(identify(explicit).what) == {"job", "model.name_or_path", "data.path", "scale_learning_rate"}


def test_data_are_known_by_their_content_wherever_they_lie(tmp_path: Path) -> None:
    places = [tmp_path / "a" / "rows.jsonl", tmp_path / "b" / "rows.jsonl"]
    for path in places:
        path.parent.mkdir()
        path.write_text('{"text": "one"}\n')
    old, new = (job(data={"path": str(path), "validation_path": str(path)}) for path in places)
    recorded = identify(old)
    assert differences(recorded, identify(new)) == []
    places[0].write_text('{"text": "two"}\n')
    assert differences(recorded, identify(old)) == [
        "data.path: content changed",
        "data.validation_path: content changed",
    ]
    # Where the content is not known, the name decides.
    places[0].unlink()
    unknown = identify(old)
    assert "data.path content" not in unknown.what
    renamed = JobIdentity({**unknown.what, "data.path": "rows.jsonl", "data.validation_path": "rows.jsonl"})
    assert differences(recorded, renamed) == []
    assert renamed.completed_by(recorded).what == recorded.what


def test_a_large_file_is_known_by_its_size_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_PIECE_BYTES", 10)
    path = tmp_path / "large"
    content = bytearray(os.urandom(5000))
    path.write_bytes(content)
    whole = digest_of_file(path)
    # The last byte is looked at, one between two pieces is not.
    for position, is_seen in ((4999, True), (0, True), (15, False)):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert (digest_of_file(path) != whole) == is_seen
    path.write_bytes(content + b"x")
    assert digest_of_file(path) != whole
    assert digest_of_file(tmp_path / "missing") is None


def test_a_local_model_is_known_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors").write_bytes(b"12345678")
    config = job(model={"name_or_path": str(folder)})
    old = identify(config)
    moved = folder.rename(tmp_path / "elsewhere").rename(tmp_path / "deeper").rename(tmp_path / "model")
    assert identify(job(model={"name_or_path": f"{moved}/"})) == old
    (folder / "config.json").write_text('{"hidden_size": 9}')
    assert differences(old, identify(config)) == ["model.name_or_path: content changed"]


def test_urls_are_known_without_their_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(url: str) -> str:
        asked.append(url)
        return "7 bytes, tag x"

    monkeypatch.setattr(identity, "_ask_server", answer)
    url = "https://user:word@host/rows.jsonl?signature=1"
    what = identify(job(data={"path": url}, trainer={"hub_token": "hf_x", "pad_token": "<p>"})).what
    assert (what["data.path"], what["data.path content"]) == ("https://host/rows.jsonl", "7 bytes, tag x")
    assert asked == [url] and "hf_x" not in str(what) and what["trainer.pad_token"] == "<p>"


def test_a_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_PATIENCE_S", 0.05)
    assert "data.path content" not in identify(job(data={"path": "no-such-scheme://host/rows.jsonl"})).what


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        (["--lr", "1e-4", "data.csv"], [("lr", "1e-4"), (None, "data.csv")]),
        (["--max-steps=9", "--flag", "--x", "-1"], [("max_steps", "9"), ("flag", True), ("x", "-1")]),
        (["-n", "3", "-5", "--"], [("n", "3"), (None, "-5"), (None, "--")]),
        (["--verbose", "data.csv"], [("verbose", True), (None, "data.csv")]),
        (["trainer.max_steps=9", "+epochs=2", "lr=3"], [("max_steps", "9"), ("epochs", "2"), (None, "lr=3")]),
        (["--x="], [("x", "")]),
    ],
)
def test_arguments_are_read_as_scripts_read_them(
    arguments: list[str], parsed: list[tuple[str | None, str | bool]]
) -> None:
    assert parse_arguments(arguments) == parsed


def script(folder: Path, text: str = "print()\n", name: str = "train.py") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def of_script(path: str, *arguments: str) -> JobIdentity:
    return identify(Config(), Program("script", path, arguments))


def test_a_script_is_known_by_name_content_and_arguments(tmp_path: Path) -> None:
    path = script(tmp_path)
    old = of_script(path, "rows.csv", "--lr", "1e-4", "--steps", "60", "--api-key", "word")
    assert "word" not in old.to_json().decode()
    for same in (["--steps=80", "--lr=1e-4", "--save_steps", "7", "rows.csv"], ["rows.csv", "--lr", "1e-4"]):
        assert differences(old, of_script(path, *same)) == []
    assert differences(old, of_script(path, "--lr", "2e-4", "other.csv")) == [
        "--lr: 1e-4 -> 2e-4",
        "arguments: rows.csv -> other.csv",
    ]
    assert of_script(path, "--steps", "80").settings != old.settings
    # The same file elsewhere is the same job.
    assert differences(of_script(path), of_script(script(tmp_path / "elsewhere"))) == []
    assert differences(old, of_script(script(tmp_path, name="b.py"))) == ["job: script train.py -> script b.py"]
    script(tmp_path, "print(1)\n")
    assert differences(old, of_script(path, "rows.csv", "--lr=1e-4")) == ["train.py: content changed"]
    assert differences(identify(job()), old) == ["job: the configured job -> script train.py"]


def test_differences_are_one_short_line() -> None:
    old = JobIdentity({"job": "x", "long": "a" * 100, **{f"n{number}": 1 for number in range(9)}})
    new = JobIdentity({"job": "x", "long": "b\nc", **{f"n{number}": 2 for number in range(9)}})
    text = summarised(differences(old, new))
    assert text.startswith(f"long: {'a' * 39}… -> b c; n0: 1 -> 2; ") and text.endswith("; and 4 more")


def test_it_survives_being_written_down() -> None:
    config = job(trainer={"max_steps": 9, "optim_args": "a=b", "lr_scheduler_kwargs": {"x": 1}})
    assert JobIdentity.from_json(identify(config).to_json()) == identify(config)


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 3000,
        b'{"version": 1, "job": {}, "settings": {}}',
        b'{"version": 1, "job": {"job": 3}, "settings": {}}',
        b'{"version": 1, "job": [], "settings": {}}',
        b'{"version": 2, "job": {"job": "x"}, "settings": {}}',
        b'{"version": 1, "job": {"job": "x"}}',
    ],
)
def test_what_cannot_be_read_is_no_identity(damaged: bytes | None) -> None:
    assert JobIdentity.from_json(damaged) is None


def test_nodes_of_one_attempt_must_agree_on_more_than_makes_the_job() -> None:
    def job(**settings: object) -> JobIdentity:
        return JobIdentity({"job": "x"}, {f"trainer.{name}": value for name, value in settings.items()})

    one = between_nodes(job(per_device_train_batch_size=4, dataloader_num_workers=2, max_steps=9), "/mnt/run")
    assert not differences(job(max_steps=9), job(max_steps=10))
    same = between_nodes(job(per_device_train_batch_size=4, dataloader_num_workers=0, max_steps=9), "/mnt/run")
    assert differences(one, same) == []
    smaller = between_nodes(job(per_device_train_batch_size=2, dataloader_num_workers=2, max_steps=9), "/mnt/run")
    assert differences(one, smaller) == ["trainer.per_device_train_batch_size: 4 -> 2"]
    elsewhere = between_nodes(job(per_device_train_batch_size=4, max_steps=9), "/mnt/other")
    assert differences(one, elsewhere) == ["checkpoint.location: /mnt/run -> /mnt/other"]
    arguments = JobIdentity({"job": "script"}, {"--epochs": "3", "--workers": "2"})
    assert between_nodes(arguments, None).what == {"job": "script", "--epochs": "3"}


def framework(*arguments: str) -> JobIdentity:
    return identify(Config(), Program("command", "/venv/bin/llamafactory-cli", arguments))


SETTINGS = "model: org/model\nlearning_rate: 1.0e-3\nmax_steps: 20\nhub_token: secret\nlora: {rank: 8, target: all}\n"


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(SETTINGS)
    return path


def test_a_file_of_settings_counts_by_its_contents(settings_file: Path) -> None:
    old = framework("train", str(settings_file))
    assert old.what["arguments"] == "train (.yaml)" and old.what["arguments.lora.rank"] == 8
    assert old.settings["arguments.max_steps"] == 20 and "secret" not in str(old)
    renamed = settings_file.rename(settings_file.with_name("another.yaml"))
    assert differences(old, framework("train", str(renamed))) == []
    renamed.write_text(SETTINGS.replace("20", "50"))
    assert differences(old, framework("train", str(renamed))) == [], "more steps of the same job"
    renamed.write_text(SETTINGS.replace("1.0e-3", "2.0e-3").replace("rank: 8", "rank: 16"))
    assert differences(old, framework("train", str(renamed))) == [
        "arguments.learning_rate: 0.001 -> 0.002",
        "arguments.lora.rank: 8 -> 16",
    ]


@pytest.mark.parametrize(("name", "text"), [("a.json", '{"lr": 1, "n": 2}'), ("a.toml", "lr = 1\nn = 2\n")])
def test_json_and_toml_are_files_of_settings_too(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = of_script(script(tmp_path), "--config", str(tmp_path / name)).what
    assert (found["--config.lr"], found["--config.n"]) == (1, 2) and "--config" not in found


def test_a_file_of_settings_that_a_framework_reads_must_be_sound(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(UsageError, match=r"bad\.yaml is no YAML: "):
        framework("train", str(tmp_path / "bad.yaml"))
    # What a script makes of its arguments is not known.
    content = of_script(script(tmp_path), str(tmp_path / "bad.yaml")).what["arguments.content"]
    assert content.startswith("xxh3:")


def test_rows_and_large_files_are_data(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[1, 2]")
    (tmp_path / "large.json").write_text("[" + " " * (1 << 20) + "]")
    found = of_script(script(tmp_path), "--rows", str(tmp_path / "rows.json"), str(tmp_path / "large.json")).what
    assert "--rows.content" in found and found["arguments"].endswith("large.json")


def test_a_file_of_which_an_older_version_has_recorded_the_name_is_not_compared(settings_file: Path) -> None:
    new = of_script(script(settings_file.parent), "--config", str(settings_file))
    old = JobIdentity({**new.what, "--config": "job.yaml"}, {})
    old = JobIdentity({key: value for key, value in old.what.items() if not key.startswith("--config.")}, {})
    assert differences(old, new) == []


def test_of_a_launcher_the_program_that_it_starts_is_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path)

    def launched(*options: str) -> JobIdentity:
        return identify(Config(), Program("command", "/bin/accelerate", ("launch", *options, "train.py", "--lr", "1")))

    old = launched("--num_processes", "2", "--mixed_precision", "bf16")
    assert old.what["job"] == "script train.py" and old.what["--lr"] == "1" and "train.py content" in old.what
    assert differences(old, launched("--num_processes", "4", "--mixed_precision", "bf16")) == []
    assert differences(old, launched("--num_processes", "2", "--mixed_precision", "no")) == [
        "accelerate --mixed_precision: bf16 -> no"
    ]


def test_a_module_is_known_by_name_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_job.py").write_text("print()\n")
    old = identify(Config(), Program("module", "own_job"))
    assert old.what["job"] == "module own_job"
    (tmp_path / "own_job.py").write_text("print(1)\n")
    assert differences(old, identify(Config(), Program("module", "own_job"))) == ["own_job: content changed"]
