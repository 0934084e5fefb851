"""Which tensors a model gets from the files of another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpointing.errors import CheckpointError
from checkpointing.resume.initial_weights import load_initial_weights


class Model(torch.nn.Module):
    def __init__(self, vocab: int = 6, value: float = 0.0) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, 2)
        self.layer = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(2, vocab, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, value)


def written(folder: Path, name: str = "model.safetensors", /, **tensors: torch.Tensor) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return str(folder)


def whole(vocab: int = 6) -> dict[str, torch.Tensor]:
    """The files of a model have one of tied weights."""
    state = Model(vocab, 3.0).state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if name != "head.weight"}


def test_all_weights_of_an_equal_model_are_loaded(tmp_path: Path) -> None:
    model = Model()
    found = load_initial_weights(model, written(tmp_path, "model.safetensors", **whole()))
    assert all(bool((parameter == 3).all()) for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert (found.loaded, found.missing, found.unused, found.resized) == (3, [], [], {})


@pytest.mark.parametrize(("theirs", "rows"), [(4, 4), (9, 6)])
def test_an_embedding_of_another_vocabulary_is_loaded_as_far_as_both_go(theirs: int, rows: int, tmp_path: Path) -> None:
    model = Model()
    found = load_initial_weights(model, written(tmp_path, "model.safetensors", **whole(theirs)))
    assert found.resized == {"embed.weight": (rows, 6)}
    assert (model.embed.weight[:rows] == 3).all() and (model.embed.weight[rows:] == 0).all()
    assert f"embed.weight: {rows} of 6 rows" in found.describe()


def test_what_one_side_lacks_is_named(tmp_path: Path) -> None:
    tensors = {**whole(), "value_head.weight": torch.ones(1)}
    del tensors["layer.bias"]
    found = load_initial_weights(Model(), written(tmp_path, "model.safetensors", **tensors))
    assert (found.missing, found.unused) == (["layer.bias"], ["value_head.weight"])
    assert "not there, so new: layer.bias" in found.describe() and "not used: value_head.weight" in found.describe()


def test_an_adapter_and_the_model_in_it_are_found_by_their_plain_names(tmp_path: Path) -> None:
    """As PEFT wraps a model, and as it writes an adapter."""
    inner = torch.nn.Module()
    inner.layer = torch.nn.Module()
    inner.layer.base_layer = torch.nn.Linear(2, 2)
    inner.layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 1, bias=False)})
    outer, middle = torch.nn.Module(), torch.nn.Module()
    middle.model, outer.base_model = inner, middle
    written(tmp_path, "model.safetensors", **{"layer.weight": torch.full((2, 2), 5.0), "layer.bias": torch.zeros(2)})
    written(tmp_path, "adapter_model.safetensors", **{"base_model.model.layer.lora_A.weight": torch.full((1, 2), 7.0)})
    found = load_initial_weights(outer, str(tmp_path))
    assert (found.loaded, found.missing, found.unused) == (3, [], [])
    state = outer.state_dict()
    assert bool((state["base_model.model.layer.base_layer.weight"] == 5).all())
    assert bool((state["base_model.model.layer.lora_A.default.weight"] == 7).all())


def test_files_in_parts_and_pickles_are_read(tmp_path: Path) -> None:
    tensors = whole()
    written(tmp_path, "model-1.safetensors", **{"embed.weight": tensors["embed.weight"]})
    written(tmp_path, "model-2.safetensors", **{name: tensors[name] for name in ("layer.weight", "layer.bias")})
    index = {"embed.weight": "model-1.safetensors", "layer.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert load_initial_weights(Model(), str(tmp_path)).loaded == 3
    (tmp_path / "pickled").mkdir()
    torch.save(tensors, tmp_path / "pickled" / "pytorch_model.bin")
    assert load_initial_weights(Model(), str(tmp_path / "pickled")).loaded == 3


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(folder: str, model: torch.nn.Module | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_initial_weights(model or Model(), folder)
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert "give the folder of a model" in refusal(str(tmp_path / "empty"))
    assert "none of its tensors" in refusal(written(tmp_path / "other", "model.safetensors", x=torch.ones(1)))
    narrow = written(tmp_path / "narrow", "model.safetensors", **{"layer.weight": torch.ones(2, 3)})
    assert "has the shape (2, 3)" in refusal(narrow)
    torn = written(tmp_path / "torn", "model.safetensors", **whole())
    file = tmp_path / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "cannot be read" in refusal(torn)
    (tmp_path / "evil").mkdir()
    torch.save({"layer.weight": Evil()}, tmp_path / "evil" / "pytorch_model.bin")
    assert "cannot be read" in refusal(str(tmp_path / "evil")) and "run" not in capsys.readouterr().out
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text("[]")
    assert "the index cannot be read" in refusal(str(tmp_path / "index"))


def test_a_model_that_is_cut_already_is_refused(tmp_path: Path) -> None:
    model = Model()
    model.layer.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(CheckpointError, match="sharded already"):
        load_initial_weights(model, written(tmp_path, "model.safetensors", **whole()))


def test_copies_that_an_optimizer_has_made_are_refused(tmp_path: Path) -> None:
    """It would write them over the weights with its first step, as DeepSpeed does."""
    model = Model()
    folder = written(tmp_path, "model.safetensors", **whole())
    assert (
        load_initial_weights(model, folder, torch.optim.SGD(model.parameters()).param_groups[0]["params"]).loaded == 3
    )
    with pytest.raises(CheckpointError, match="copies of the weights already"):
        load_initial_weights(model, folder, [parameter.float().clone() for parameter in model.parameters()])


def test_quantized_weights_are_not_cast(tmp_path: Path) -> None:
    model = Model()
    model.layer.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"torch.float32, and torch.int8"):
        load_initial_weights(model, written(tmp_path, "model.safetensors", **whole()))
    assert load_initial_weights(Model().bfloat16(), str(tmp_path)).loaded == 3


def test_the_single_file_counts_before_the_index_of_an_older_one(tmp_path: Path) -> None:
    written(tmp_path, "model.safetensors", **whole())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"embed.weight": "gone.safetensors"}}')
    assert load_initial_weights(Model(), str(tmp_path)).loaded == 3


def test_what_a_module_keeps_besides_tensors_is_left_alone(tmp_path: Path) -> None:
    class Extra(Model):
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    assert load_initial_weights(Extra(), written(tmp_path, "model.safetensors", **whole())).missing == []
