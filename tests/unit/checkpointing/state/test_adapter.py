"""An adapter is saved alone, and goes on only upon the base that it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from unit.checkpointing.doubles import Connection, manager, options

from checkpointing.errors import CheckpointError
from checkpointing.files.file_images import pieces
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.safetensors_files import safetensors_image
from checkpointing.files.torch_files import TorchFileLayout
from checkpointing.process.device import HostDevice
from checkpointing.state.adapter import BASE_NAME
from checkpointing.state.train_state import TrainState
from checkpointing.transformers.wrapped_models import adapter_of

# Within PEFT.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def model(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return SmolLM3ForCausalLM(
        SmolLM3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
        )
    )  # fmt: skip


def tracked(base: Any, r: int = 4, **options: Any) -> TrainState:
    torch.manual_seed(1)
    adapted = get_peft_model(base, LoraConfig(r=r, target_modules="all-linear", task_type="CAUSAL_LM", **options))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    return TrainState(adapted, torch.optim.AdamW(trained), adapter=adapter_of(adapted))


def saved(source: TrainState) -> LoadedCheckpoint:
    state = source.capture()
    images = [safetensors_image(state.weights_name, state.model)]
    images += [TorchFileLayout(f"{name}.pt").image(value) for name, value in state.states.items()]
    window = memoryview(bytearray(4096))
    data = {image.name: b"".join(map(bytes, pieces(image, window, HostDevice()))) for image in images}
    files = data | state.small
    views = {name: memoryview(bytearray(content)) for name, content in files.items()}
    return LoadedCheckpoint(
        "/runs/checkpoint-20", step=20, world_size=1, samples_consumed=80, files=views, path=None, private=True
    )


# PEFT 0.18 takes any model of a kind that may be tied for one that is.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "and-the-head"])
def test_an_adapter_comes_back_on_its_base(options: dict[str, Any]) -> None:
    source, target = (
        tracked(model(tie_word_embeddings=False), **options),
        tracked(model(tie_word_embeddings=False), **options),
    )
    with torch.no_grad():
        for parameter in source.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    point = saved(source)
    assert point.has("adapter_model.safetensors") and point.has(BASE_NAME) and not point.has("model.safetensors")
    target.restore_model(point)
    for (name, a), b in zip(source.model.named_parameters(), target.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_what_is_saved_is_small_and_by_reference() -> None:
    source = tracked(model())
    state = source.capture()
    trained = {parameter.data_ptr() for parameter in source.model.parameters() if parameter.requires_grad}
    assert {tensor.data_ptr() for tensor in state.model.values()} == trained
    assert state.parameters == state.model.keys()
    assert source.expected_bytes() == 3 * sum(tensor.nbytes for tensor in state.model.values())


@pytest.mark.parametrize(
    ("base", "r", "text"),
    [(1, 4, "was trained on another base model"), (0, 8, "holds another adapter: 28 of its weights")],
)
def test_another_base_or_another_adapter_is_refused(base: int, r: int, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        tracked(model(base), r).restore_model(saved(tracked(model())))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_head_that_is_drawn_anew_is_no_other_base() -> None:
    """PEFT keeps the original of what is trained whole; a classifier's is drawn at random by each process."""
    source, target = (tracked(model(tie_word_embeddings=False), modules_to_save=["lm_head"]) for _ in range(2))
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "original_module" in name:
                parameter.normal_()
    target.restore_model(saved(source))


def test_what_an_adapter_does_not_hold_is_saved_with_the_whole_model() -> None:
    base = model()
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.base_model.model.model.norm.weight.requires_grad_(True)
    assert adapter_of(adapted) is None


def test_an_adapter_is_no_whole_model_nor_the_other_way_round() -> None:
    whole = TrainState(model(), torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    with pytest.raises(
        CheckpointError, match=r"holds adapter_model.safetensors, this training saves model.safetensors"
    ):
        whole.restore_model(saved(tracked(model())))
    with pytest.raises(
        CheckpointError, match=r"holds model.safetensors, this training saves adapter_model.safetensors"
    ):
        tracked(model()).restore_model(saved(whole))


def test_an_adapter_that_is_not_found_is_not_saved_as_an_empty_one() -> None:
    own = tracked(model())
    state = TrainState(torch.nn.ModuleDict({"wrapper": own.model}), own.optimizer, adapter=own.adapter)
    with pytest.raises(CheckpointError, match="no weight of the adapter was found in the model, a ModuleDict"):
        state.capture()


def test_an_adapter_is_found_in_a_compiled_model(tmp_path: Path) -> None:
    """accelerate's FSDP2 leaves the model in torch.compile's wrapper, whose names PEFT does not know."""
    own = tracked(model())
    training = manager(options(tmp_path), Connection(tmp_path))
    training.track(model=torch.compile(own.model), optimizer=own.optimizer, adapter=own.adapter)
    assert training._tracked.state.capture().model.keys() == own.capture().model.keys()


def merged_and_unmerged(state: TrainState) -> None:
    """As an online trainer does to hand the weights to a generator."""
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    adapted: Any = state.model
    adapted.merge_adapter()
    adapted.unmerge_adapter()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_that_merging_has_rounded_is_saved_and_comes_back(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest was taken at the first save, after the first merge: no script had such a base."""
    source, target, third = (tracked(model().to(dtype)) for _ in range(3))
    own = manager(options(tmp_path), Connection(tmp_path))
    own.track(model=source.model, optimizer=source.optimizer, adapter=source.adapter)
    own.begin(0)
    own.close()
    assert source.capture().states == {} and not caplog.text
    merged_and_unmerged(source)
    target.restore_model(saved(source))
    assert caplog.text.count("has changed the base of the adapter: it is saved whole") == 1
    for (name, a), b in zip(source.model.named_parameters(), target.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    # The resumed run goes on to save it, without a sample that differs.
    merged_and_unmerged(target)
    third.restore_model(saved(target))
    for (name, a), b in zip(target.model.named_parameters(), third.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_changed_base_that_is_quantised_is_refused() -> None:
    source = tracked(model())
    assert source.adapter is not None
    layer = "base_model.model.model.layers.0.self_attn.q_proj.base_layer"
    weight: Any = source.model.get_submodule(layer).weight
    source.adapter.begin(source.model)
    weight.data += 1
    with torch.no_grad():
        weight.data = weight.data.to(torch.uint8)
    with pytest.raises(CheckpointError, match=r"which cannot be saved: .*q_proj\.weight is quantised or sharded"):
        source.capture()


def test_an_adapter_that_is_merged_as_it_is_saved_is_refused() -> None:
    """A resumed run would add it to the base that has it already."""
    source = tracked(model())
    assert source.adapter is not None
    source.adapter.begin(source.model)
    merged_and_unmerged(source)
    adapted: Any = source.model
    adapted.merge_adapter()
    with pytest.raises(CheckpointError, match=r"is merged into its base.*Unmerge it"):
        source.capture()
    adapted.unmerge_adapter()
    assert source.capture().states
