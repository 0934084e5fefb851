"""A model of another type, in files of another size, as Hugging Face reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.files.file_images import pieces
from checkpointing.files.model_conversion import convert
from checkpointing.files.safetensors_files import safetensors_image
from checkpointing.process.device import HostDevice
from checkpointing.storage.durable import write_file


def write(path: Path, state: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    image = safetensors_image(path.name, state)
    write_file(path, pieces(image, memoryview(bytearray(1 << 16)), HostDevice()))


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=request.param))


@pytest.fixture
def checkpoint(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    """The files that a checkpoint of a Trainer has."""
    folder = tmp_path / "checkpoint"
    write(folder / "model.safetensors", model.state_dict())
    model.config.save_pretrained(folder)
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin", "trainer_state.json", "manifest.json"):
        (folder / name).write_bytes(b"{}")
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    return folder


@pytest.mark.parametrize("max_bytes", [5 * 10**9, 8_000, 1])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_transformers_loads_the_same_bits(
    model: LlamaForCausalLM, checkpoint: Path, tmp_path: Path, dtype: torch.dtype | None, max_bytes: int
) -> None:
    out = tmp_path / "out"
    convert(checkpoint, out, dtype, max_bytes)
    found = AutoModelForCausalLM.from_pretrained(out)
    assert found.dtype == (dtype or torch.float32)
    model.save_pretrained(tmp_path / "stock")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=found.dtype)
    assert found.state_dict().keys() == wanted.state_dict().keys()
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in wanted.state_dict().items())
    tokens = torch.arange(8)[None]
    assert torch.equal(found(tokens).logits, wanted(tokens).logits)
    others = {path.name for path in out.iterdir() if path.suffix != ".safetensors"}
    assert others - {"model.safetensors.index.json"} == {"config.json", "tokenizer.json"}


def test_files_are_no_larger_than_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(checkpoint, out, torch.bfloat16, 5_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and {path.name for path in files} == {*index["weight_map"].values()}
    sizes = {path.name: sum(value.nbytes for value in load_file(path).values()) for path in files}
    assert max(sizes.values()) <= 5_000 and sum(sizes.values()) == index["metadata"]["total_size"]
    for path in files:
        with safe_open(path, "pt") as opened:
            assert opened.metadata()["format"] == "pt"


def test_full_precision_is_that_of_the_optimizer(tmp_path: Path) -> None:
    precise = torch.tensor([1.0001, 2.0])
    write(tmp_path / "in" / "model.safetensors", {"weight": precise.bfloat16(), "other": torch.ones(2).bfloat16()})
    write(tmp_path / "in" / "master_weights.safetensors", {"weight": precise})
    for name, dtype, wanted in (("a", torch.float32, precise), ("b", torch.float16, precise.bfloat16().half())):
        (tmp_path / name).mkdir()
        convert(tmp_path / "in", tmp_path / name, dtype)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
        assert torch.equal(load_file(tmp_path / name / "model.safetensors")["weight"], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_stay_tied_where_they_are_the_optimizers(
    dtype: torch.dtype, model: LlamaForCausalLM, checkpoint: Path, tmp_path: Path
) -> None:
    masters = {name: value.detach().clone() for name, value in model.named_parameters()}
    (checkpoint / "model.safetensors").unlink()
    write(checkpoint / "model.safetensors", model.bfloat16().state_dict())
    write(checkpoint / "master_weights.safetensors", masters)
    convert(checkpoint, tmp_path / "out", dtype)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not model.config.tie_word_embeddings)
    assert torch.equal(stored["model.embed_tokens.weight"], masters["model.embed_tokens.weight"].to(dtype))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    is_tied = found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
    assert is_tied == model.config.tie_word_embeddings


def test_the_optimizers_weight_is_that_of_every_name(tmp_path: Path) -> None:
    """Also where the optimizer knows a tied weight by another name than the one that is stored."""
    tied, precise = torch.ones(2, 2).bfloat16(), torch.full((2, 2), 1.0001)
    write(tmp_path / "in" / "model.safetensors", {"embed": tied, "head": tied, "other": torch.ones(2).bfloat16()})
    write(tmp_path / "in" / "master_weights.safetensors", {"head": precise})
    (tmp_path / "out").mkdir()
    convert(tmp_path / "in", tmp_path / "out", torch.float32)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    weights = [value for name, value in stored.items() if name != "other"]
    assert len(weights) == 1 and torch.equal(weights[0], precise)


@pytest.mark.parametrize("value", [1e5, -3e38])
def test_a_number_that_the_type_does_not_hold_is_named(value: float, tmp_path: Path) -> None:
    inf = float("inf")
    write(tmp_path / "in" / "model.safetensors", {"fits": torch.tensor([6e4, inf]), "large": torch.tensor([value])})
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"'large' .* float16, .* --dtype bf16"):
        convert(tmp_path / "in", tmp_path / "out", torch.float16)


def test_infinity_stays_what_it_is(tmp_path: Path) -> None:
    write(tmp_path / "in" / "model.safetensors", {"mask": torch.tensor([float("-inf"), float("nan"), 1.0])})
    (tmp_path / "out").mkdir()
    convert(tmp_path / "in", tmp_path / "out", torch.float16)
    found = load_file(tmp_path / "out" / "model.safetensors")["mask"]
    assert found[0] == float("-inf") and found[1].isnan() and found[2] == 1


def test_numbers_that_are_no_weights_keep_their_type(tmp_path: Path) -> None:
    write(tmp_path / "in" / "model.safetensors", {"position": torch.arange(3), "weight": torch.ones(2)})
    (tmp_path / "out").mkdir()
    convert(tmp_path / "in", tmp_path / "out", torch.float16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert (found["position"].dtype, found["weight"].dtype) == (torch.int64, torch.float16)


def test_an_adapter_stays_an_adapter(tmp_path: Path) -> None:
    write(tmp_path / "in" / "adapter_model.safetensors", {"lora_A": torch.ones(2, 4), "lora_B": torch.ones(4, 2)})
    (tmp_path / "out").mkdir()
    convert(tmp_path / "in", tmp_path / "out", torch.bfloat16, 1)
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")["lora_A"].dtype == torch.bfloat16


def test_what_has_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidCheckpoint, match="no weights in safetensors files"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(InvalidCheckpoint, match="its weights cannot be parsed"):
        convert(tmp_path, tmp_path / "out")
