"""What is a secret by its name or by its looks, and what is not, which must be recorded as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.session.identity import JobIdentity, differences
from runner.session.masking import is_secret, masked

NAMES = """token hub_token --HF_TOKEN --hf-token HUGGING_FACE_HUB_TOKEN wandb-key WANDB_API_KEY aws_secret_access_key
    AWS_ACCESS_KEY_ID aws_session_token password db_password --api-key openai_api_key trainer.hub_token client_secret
    private_key credentials github_token github-token"""
OTHERS = """pad_token eos_token image_token max_tokens num_tokens tokens tokenizer key keys num_key_value_heads
    label_key secretary text_key token_type_ids monkey prompt_token_ids sort_key"""
VALUES = [
    "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7",
    "ghp_" + "a1" * 18,
    "AKIA" + "IOSFODNN7EXAMPLE",
    "sk-proj-" + "abcDEF0123456789",
    "postgres://me:hunter2@db/x",
    "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY1",
    "0123456789abcdef0123456789abcdef01234567",
]
SOUND = [
    "meta-llama/Llama-3.1-8B-Instruct",
    "/data/runs/2026-11-29/Very_Long_Folder_Names_With_Digits_123456/and/more",
    "s3://bucket/prefix/of/a/Checkpoint-1234567890/model.safetensors",
    "1e-4",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "HuggingFaceTB/SmolLM3-3B",
    "en-sk-translation-corpus-v1",
    "sk-resnet50-imagenet-v2",
    "hf_llama3instruct8b1",
    "hf_my_dataset_name_that_is_long_2026",
    "main",
    "https://example.org/data/Some-File-With-A-Long-Name-2026.jsonl",
]


@pytest.mark.parametrize("name", NAMES.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    value = "short1"
    assert value not in JobIdentity({"job": "script x.py", name: value}, {name: value}).to_json().decode()
    assert value not in masked(f"{name}={value}")


@pytest.mark.parametrize("name", OTHERS.split())
def test_names_of_a_job(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("value", VALUES)
def test_values_that_are_secrets_whatever_they_are_called(value: str) -> None:
    secret = value.partition("://")[2].partition("@")[0] or value
    for text in (value, f"--x {value} y", f"name={value}", f"wandb.api_key={value} lr=1"):
        assert secret not in masked(text) and masked(masked(text)) == masked(text)
    assert secret not in JobIdentity({"job": "script x.py", "arguments": f"a {value}"}).to_json().decode()
    assert masked([value, {"x": value}]) == [masked(value), {"x": masked(value)}]


@pytest.mark.parametrize("value", SOUND)
def test_values_of_a_job(value: str) -> None:
    assert masked(value) == value


def test_a_renewed_token_is_the_same_job_and_another_revision_is_not() -> None:
    tokens = [JobIdentity({"job": "script x.py", "arguments": f"a hf_aB{digit * 28}"}) for digit in "12"]
    assert differences(*tokens) == []
    for recorded in (f"wandb.api_key={digit} lr=1" for digit in "1a"):
        job = JobIdentity({"job": "script x.py", "arguments": recorded})
        # A record that is read back.
        assert differences(JobIdentity.from_json(job.to_json()) or job, job) == []
    revisions = [JobIdentity({"job": "script x.py", "--revision": f"{n:02x}" + VALUES[-1][2:]}) for n in (1, 2)]
    assert len(differences(*revisions)) == 1


def test_a_record_of_an_earlier_version_is_still_the_same_job() -> None:
    now = JobIdentity({"job": "script x.py", "arguments": f"a {VALUES[0]}"})
    recorded = b'{"version": 1, "job": {"job": "script x.py", "--HF_TOKEN": "x", "arguments": "a %s"}, "settings": {}}'
    before = JobIdentity.from_json(recorded % VALUES[0].encode())
    assert before is not None and differences(before, now) == []


@given(st.text(max_size=80))
def test_masking_once_is_enough(text: str) -> None:
    assert masked(masked(text)) == masked(text)
