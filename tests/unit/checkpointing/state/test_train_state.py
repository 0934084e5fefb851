"""What is captured of a training, and what comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_training import Average

from checkpointing.errors import CheckpointError
from checkpointing.files import loaded_checkpoint as restore_point
from checkpointing.files.file_images import FileImage, blob_image, pieces
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.safetensors_files import safetensors_image
from checkpointing.files.torch_files import TorchFileLayout, torch_bytes
from checkpointing.format.layout import EXTRA_STATE_NAME, MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, rank_state_name
from checkpointing.process.device import HostDevice
from checkpointing.state import train_state
from checkpointing.state.captured_state import CapturedState
from checkpointing.state.kinds import kind_of
from checkpointing.state.train_state import TrainState, hooks_with_memory


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def training(seed: int = 0, **options: Any) -> TrainState:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), **options)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state.scheduler.step()
    return state


def point(state: CapturedState) -> LoadedCheckpoint:
    images: list[FileImage] = [
        safetensors_image(state.weights_name, state.model),
        TorchFileLayout(OPTIMIZER_NAME).image(state.optimizer),
        *(TorchFileLayout(f"{name}.pt").image(value) for name, value in state.states.items()),
        *(blob_image(name, data) for name, data in state.small.items()),
    ]
    window = memoryview(bytearray(1 << 16))
    files = {
        image.name: memoryview(bytearray(b"".join(map(bytes, pieces(image, window, HostDevice()))))) for image in images
    }
    return LoadedCheckpoint(
        "/runs/checkpoint-1", step=1, world_size=1, samples_consumed=1, files=files, path=None, private=True
    )


class Keeper:
    """Keeps the tensors that it is given, as an optimizer does with its step counts."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {"a": torch.zeros(3)}
        self.kept["view"] = self.kept["a"][1:]

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def test_what_further_states_keep_is_not_the_memory_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator large files are not copied: the ranks of a node counted each other's steps."""
    monkeypatch.setattr(restore_point, "SMALL_BYTES", 0)
    written, keeper = training(states={"keeper": Keeper()}), Keeper()
    saved = point(written.capture(readable=set()))
    saved.private = False
    held = saved.files["keeper.pt"]
    before = bytes(held)
    training(states={"keeper": keeper}).restore_optimizer(saved, 0)
    keeper.kept["a"] += 1
    assert bytes(held) == before and keeper.kept["view"].tolist() == [1.0, 1.0]


class Window(Keeper):
    """Says how it is divided."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.kept = {"all": states}


def of_three_ranks(rank: int = 0) -> LoadedCheckpoint:
    """A checkpoint with an object that each rank has saved for itself."""
    saved = point(training().capture())
    saved.world_size, saved.rank = 3, rank
    for other in range(3):
        saved.files[rank_state_name(other)] = memoryview(bytearray(torch_bytes({"states": {"mine": {"a": other}}})))
    return saved


def test_what_each_rank_has_saved_is_not_given_to_fewer_or_more_ranks() -> None:
    """Objects of three ranks were resumed on two: the third one's was lost, and nothing said so."""
    own = training(states={"mine": Keeper()})
    for world_size in (2, 4, 1):
        with pytest.raises(
            CheckpointError, match=rf"'mine' .* each of 3 ranks.* are {world_size} now.*load_state_dicts"
        ):
            own.check_number_of_ranks(of_three_ranks(), world_size)
    own.check_number_of_ranks(of_three_ranks(), 3)
    # What was equal on all ranks, or is not tracked any more, fits.
    own.check_number_of_ranks(point(training(states={"mine": Keeper()}).capture()), 2)
    training(states={"other": Keeper()}).check_number_of_ranks(of_three_ranks(), 2)


def test_a_change_of_the_number_of_ranks_may_be_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CHECKPOINT_ALLOW_CHANGES", "1")
    training(states={"mine": Keeper()}).check_number_of_ranks(of_three_ranks(), 2)
    assert "there are 2 now: each keeps its own" in caplog.text


def test_an_object_that_says_how_it_is_divided_gets_those_of_all_ranks() -> None:
    window = Window()
    own = training(states={"mine": window})
    own.check_number_of_ranks(of_three_ranks(), 2)
    own.restore_states(of_three_ranks(1), 1, {"mine"}, 2)
    assert window.kept == {"all": [{"a": 0}, {"a": 1}, {"a": 2}]}
    own.restore_states(of_three_ranks(1), 1, {"mine"}, 3)
    assert window.kept == {"a": 1}


class Best:
    """One of the script's own."""


def test_a_kind_of_value_that_comes_later_is_checked_before_it_is_saved() -> None:
    """A best loss was None until the first evaluation, and then what made every further checkpoint unreadable."""
    keeper, readable = Keeper(), set[object]()
    keeper.kept["best"] = None
    own = training(states={"keeper": keeper})
    own.capture(readable=readable)
    keeper.kept["best"] = np.float32(0.5)
    assert np.float32 not in readable
    saved = point(own.capture(readable=readable))
    assert np.float32 in readable
    read = Keeper()
    training(states={"keeper": read}).restore_states(saved, 0, {"keeper"})
    assert read.kept["best"] == np.float32(0.5)
    keeper.kept["best"] = [Best()]
    with pytest.raises(CheckpointError, match=r"^keeper.best\[0\]: .*Best cannot be kept"):
        own.capture(readable=readable)


def test_what_has_known_kinds_only_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(train_state, "check_readable", lambda name, _: names.append(name))
    keeper, readable = Keeper(), set[object]()
    own = training(states={"keeper": keeper})
    own.capture(readable=readable)
    assert {"keeper.pt", "optimizer.pt"} <= set(names)
    names.clear()
    own.capture(readable=readable)
    assert names == []
    keeper.kept["more"] = 3 + 4j
    own.capture(readable=readable)
    assert names == ["keeper.pt"]


def test_what_was_trained_and_is_frozen_now_is_said(caplog: pytest.LogCaptureFixture) -> None:
    written, read = training(0), training(1)
    read.model.get_submodule("0").requires_grad_(False)
    read.restore_optimizer(point(written.capture()), 0)
    assert "optimizer state of 2 parameters that need no gradients now, such as 0.weight" in caplog.text


def test_what_a_checkpoint_lacks_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """An average that was given another name began again, without reporting it."""
    written = training(states={"ema": Keeper()})
    saved = point(TrainState(written.model, written.optimizer, states=written.states).capture())
    training(states={"average": Keeper()}).restore_optimizer(saved, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "/runs/checkpoint-1 holds no state 'average': training begins with a new one",
        "/runs/checkpoint-1 holds no scheduler: training begins with a new one",
    ]


def test_at_a_snapshot_the_model_is_walked_once_for_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a millisecond of the training thread for a model of billions of parameters."""
    own, walks = training(), list[Any]()

    def counted(*given: Any) -> Any:
        walks.append(given)
        return kind_of(*given)

    monkeypatch.setattr(train_state, "kind_of", counted)
    assert own.has_step_hook and not TrainState(own.model, Keeper()).has_step_hook
    own.capture()
    assert len(walks) == 1


def test_what_is_captured_is_restored() -> None:
    written, read = training(0), training(1)
    saved = point(written.capture(readable=set()))
    read.restore_model(saved)
    read.restore_optimizer(saved, 0)
    for name, value in written.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], value)
    assert read.scheduler.last_epoch == 1
    found, expected = read.optimizer.state_dict()["state"], written.optimizer.state_dict()["state"]
    assert all(torch.equal(found[number]["exp_avg"], expected[number]["exp_avg"]) for number in expected)


def test_parameters_are_captured_by_reference_and_buffers_by_value() -> None:
    own = training()
    state = own.capture()
    assert state.weights_name == MODEL_NAME and SCHEDULER_NAME in state.small
    assert state.model["0.weight"].data_ptr() == own.model[0].weight.data_ptr()  # type: ignore[index]
    mean = state.model["1.running_mean"].clone()
    own.model(torch.randn(5, 3))
    assert torch.equal(state.model["1.running_mean"], mean) and state.changed() == 0
    with torch.no_grad():
        own.model[0].weight.add_(1)  # type: ignore[index]
    assert state.changed() == 1


class Counted(torch.nn.Linear):
    """Has a state that is not a tensor."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_a_modules_extra_state_is_kept_in_a_file_of_its_own() -> None:
    models = [Counted(2, 2), Counted(2, 2)]
    models[0].count = 7
    states = [TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    captured = states[0].capture(readable=set())
    assert EXTRA_STATE_NAME in captured.small and not any("extra" in name for name in captured.model)
    states[1].restore_model(point(captured))
    assert models[1].count == 7


def test_the_size_of_a_snapshot_is_expected_before_the_first_step() -> None:
    model = network()
    nbytes = sum(value.nbytes for value in model.parameters())
    fresh = TrainState(model, torch.optim.AdamW(model.parameters()))
    assert fresh.expected_bytes() >= 3 * nbytes
    stepped = training()
    captured = sum(tensor.nbytes for tensor in [*stepped.capture().model.values()])
    assert stepped.expected_bytes() >= captured + 2 * nbytes


@pytest.mark.parametrize("name", ["optimizer", "rng_state", "two words"])
def test_names_of_further_states_must_be_free(name: str) -> None:
    with pytest.raises(ValueError, match=f"the name '{name}' is not allowed"):
        training(states={name: Average(network())})


def test_a_state_that_does_not_fit_is_refused() -> None:
    saved = point(training().capture())
    other = torch.nn.Linear(9, 9)
    state = TrainState(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="does not fit this model"):
        state.restore_model(saved)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt does not fit this SGD"):
        state.restore_optimizer(saved, 0)


def test_hooks_that_remember_tensors_are_found_in_either_order() -> None:
    class PowerSGD:
        def __init__(self) -> None:
            self.error_dict: dict[str, Any] = {}

    class Plain:
        def __init__(self) -> None:
            self.group = "gloo"

    def hook() -> None: ...

    model = SimpleNamespace(_comm_hooks=[(hook, PowerSGD()), (Plain(), hook)])
    assert hooks_with_memory(model) == ["PowerSGD"] and hooks_with_memory(network()) == []
