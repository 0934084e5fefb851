"""Models: what is special about their parameters, buffers and further state."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from compatibility import tiny
from compatibility.cases_optimizers import train
from compatibility.cases_trainer import trainer
from compatibility.ranks import Run
from compatibility.table import IDENTICAL, case, refused
from torch import nn
from torch.nn.utils import parametrizations


def _module(name: str, make: Callable[[], nn.Module], *, verdict: Any = IDENTICAL, **options: Any) -> None:
    """Trained in a bare loop."""

    @case(f"models/{name}", verdict=verdict)
    def _body(run: Run) -> None:
        run.initialize()
        model = make()
        train(
            run,
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
            **options,
        )


class _Scaled(tiny.Perceptron):
    """A number as parameter, and one as buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.count.add_(1)
        return super().forward(x * self.scale, labels)


class _Tied(tiny.Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(self.second(x), labels)


class _Double(tiny.Perceptron):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(x.double(), labels.double() if labels is not None else None)


class _Complex(tiny.Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(12, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward((x * self.phase).real, labels)


class _Mixed(tiny.Perceptron):
    """Half of it in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(12, 12, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(self.narrow(x.bfloat16()).float(), labels)


class _Extra(tiny.Perceptron):
    """Counts calls outside of its tensors."""

    def __init__(self, kind: Callable[[int], Any], number: Callable[[Any], int]) -> None:
        super().__init__()
        self.calls, self._kind, self._number = 0, kind, number

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.calls += 1
        return super().forward(x + 0.01 * self.calls, labels)

    def get_extra_state(self) -> Any:
        return self._kind(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = self._number(state)


class _Late(tiny.Perceptron):
    """Its parameters' shapes are known after the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(8)
        with torch.no_grad():
            self(torch.zeros(1, 12))


class _Normed(tiny.Perceptron):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)
        parametrizations.spectral_norm(self.last)


class _Sparse(nn.Module):
    """Gradients of the embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.EmbeddingBag(20, 4, sparse=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        out = self.last(self.table((x.abs() * 5).long().clamp(max=19))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels)}


class _Odd(tiny.Perceptron):
    """Strided and empty parameters, and containers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(12, 12).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.several = nn.ParameterList([torch.zeros(12), torch.zeros(12)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(x @ self.columns + self.several[0] - self.several[1] + self.nothing.sum(), labels)


_module("BatchNorm", lambda: tiny.Perceptron(norm=True))
_module("BatchNorm, buffers of each rank", lambda: tiny.Perceptron(norm=True), ddp={"broadcast_buffers": False})
_module("SyncBatchNorm off, momentum None", lambda: _averaging())
_module("numbers as parameters and buffers", _Scaled)
_module("tied weights", _Tied)
_module("float64", lambda: _Double().double())
_module("complex", _Complex, verdict=refused("phase.*complex64"))
_module("mixed dtypes", _Mixed)
_module("extra state, tensor", lambda: _Extra(torch.tensor, int))
_module(
    "extra state, dict",
    lambda: _Extra(lambda calls: {"calls": calls, "more": [1, "two", None]}, lambda state: state["calls"]),
)
_module(
    "extra state, bytes", lambda: _Extra(lambda calls: str(calls).encode(), lambda state: int(bytes(state).decode()))
)
_module("late parameters", _Late)
_module("parametrisations", _Normed)
_module("odd shapes", _Odd)
_module("frozen base", lambda: _frozen())
_module("channels_last", lambda: _convolution())


def _averaging() -> nn.Module:
    model = tiny.Perceptron(norm=True)
    model.norm.momentum = None
    return model


def _frozen() -> nn.Module:
    model = tiny.Perceptron()
    model.first.requires_grad_(False)
    return model


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 4, 2)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        out = self.last(self.conv(x.view(-1, 3, 2, 2)).flatten(1)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels)}


def _convolution() -> nn.Module:
    model = _Convolution()
    for value in (model.conv.weight,):
        value.data = value.data.contiguous(memory_format=torch.channels_last)
    return model


@case("models/sparse gradients")
def _sparse(run: Run) -> None:
    run.initialize()
    model = _Sparse()
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.05))


@case("models/sparse gradients, SparseAdam")
def _sparse_adam(run: Run) -> None:
    run.initialize()
    model = _Sparse()
    model.last.requires_grad_(False)
    train(run, model, torch.optim.SparseAdam(list(model.table.parameters()), lr=0.05))


# -- states of the user's --------------------------------------------------------------------------------------------


class _State:
    """Anything with `state_dict` and `load_state_dict`."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self.value = make(0)

    def update(self, step: int) -> None:
        self.value = self._make(step)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _states(name: str, make: Callable[[int], Any], *, verdict: Any = IDENTICAL) -> None:
    """A state that changes with the step; after a restart, what was restored is recorded."""

    @case(f"states/{name}", verdict=verdict)
    def _body(run: Run) -> None:
        run.initialize()
        model = tiny.Perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        state = _State(make)
        manager = run.manager(model=model, optimizer=optimizer, states={"mine": state})
        for step, _ in run.steps(manager):
            # A numpy scalar may come back as the same Python number.
            value = state.value.item() if isinstance(state.value, np.generic) else state.value
            run.saw(step, "state", [type(value).__name__, value])
            state.update(step + 1)
            manager.step(step + 1)
        manager.close()
        run.finish(model=model)


_states("numbers and texts", lambda step: {"step": step, "name": f"at {step}", "rates": [0.5 * step, None, True]})
_states("tensors", lambda step: {"a": torch.full((3,), float(step)), "b": [torch.tensor(step)]})
_states("tuple", lambda step: (step, "two", (3.0,)))
_states("OrderedDict", lambda step: OrderedDict(b=step, a=2))
_states("keys that are no texts", lambda step: {1: step, (2, 3): "pair", None: 0.5})
_states("set", lambda step: {step, step + 1})
_states("bytes", lambda step: bytes([step, 255]))
_states("big integer", lambda step: 2**80 + step)
_states("infinities", lambda step: [float("inf"), -float("inf"), float(step)])
_states("complex number", lambda step: complex(step, 1))
_states("numpy array", lambda step: np.arange(3.0) + step)
_states("numpy scalar", lambda step: np.float64(step))
_states("deque", lambda step: deque([step, 2], maxlen=4))
_states("Path", lambda step: PurePosixPath(f"/a/{step}"), verdict=refused("mine"))
_states("object", lambda step: _State(int), verdict=refused("mine"))
_states("lambda", lambda step: lambda: step, verdict=refused("mine"))
_states("dtype", lambda step: torch.float16)
_states("sparse tensor", lambda step: torch.eye(3).mul(step + 1).to_sparse(), verdict=refused(r"mine\.value.*sparse"))


@case("states/of each rank")
def _per_rank(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = _State(lambda step: 1000 * run.rank + step)
    manager = run.manager(model=model, optimizer=optimizer, states={"mine": state})
    for step, _ in run.steps(manager):
        run.saw(step, "state", state.value)
        state.update(step + 1)
        manager.step(step + 1)
    manager.close()
    run.finish(model=model)


# -- models of transformers, in its Trainer --------------------------------------------------------------------------


@case("models/Mixtral", stock=True)
def _mixtral(run: Run) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=64,
        output_router_logits=True,
    )
    run.train(trainer(run, model=MixtralForCausalLM(config), ddp_find_unused_parameters=True))


@case("models/ViT", stock=True)
def _vit(run: Run) -> None:
    from transformers import ViTConfig, ViTForImageClassification, default_data_collator

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.1,
        num_labels=3,
    )
    generator = torch.Generator().manual_seed(3)
    images: Any = [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": n % 3} for n in range(14)]
    made = trainer(run, model=ViTForImageClassification(config), dataset=images, data_collator=default_data_collator)
    run.train(made)


@case("models/Llama, tied embeddings", stock=True)
def _llama(run: Run) -> None:
    run.train(trainer(run, model=tiny.llama(tie_word_embeddings=True)))


@case("models/Llama, untied embeddings", stock=True)
def _llama_untied(run: Run) -> None:
    run.train(trainer(run, model=tiny.llama(tie_word_embeddings=False)))


@case("models/Llama in bfloat16", stock=True)
def _llama_bf16(run: Run) -> None:
    run.train(trainer(run, model=tiny.llama().bfloat16(), bf16=True))


@case("models/Mamba", stock=True)
def _mamba(run: Run) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(1)
    config = MambaConfig(vocab_size=tiny.VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1)

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in tiny.collate(batch).items() if name != "attention_mask"}

    run.train(trainer(run, model=MambaForCausalLM(config), data_collator=collate))


@case("models/wav2vec2, masks drawn from numpy", stock=True)
def _wav2vec2(run: Run) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification, default_data_collator

    torch.manual_seed(1)
    config = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8,),
        conv_stride=(5,),
        conv_kernel=(10,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.5,
        mask_time_length=2,
        layerdrop=0.0,
        num_labels=2,
        classifier_proj_size=8,
    )
    generator = torch.Generator().manual_seed(3)
    waves: Any = [{"input_values": torch.randn(100, generator=generator), "labels": n % 2} for n in range(14)]
    model = Wav2Vec2ForSequenceClassification(config)
    run.train(trainer(run, model=model, dataset=waves, data_collator=default_data_collator))


# -- PEFT -------------------------------------------------------------------------------------------------------------


def _peft(name: str, kind: str, *, verdict: Any = IDENTICAL, **options: Any) -> None:
    @case(f"PEFT/{name}", stock=True, verdict=verdict)
    def _body(run: Run) -> None:
        import peft

        torch.manual_seed(1)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(tiny.llama(), config)
        run.train(trainer(run, model=model))


_ALL = {"target_modules": ["q_proj", "v_proj"]}
_peft("LoRA", "LoraConfig", r=2, lora_dropout=0.1, target_modules="all-linear")
_peft("LoRA, embeddings saved", "LoraConfig", r=2, **_ALL, modules_to_save=["lm_head"])
_peft("LoRA, biases", "LoraConfig", r=2, bias="all", **_ALL)
_peft("DoRA", "LoraConfig", r=2, use_dora=True, **_ALL)
_peft("rsLoRA", "LoraConfig", r=2, use_rslora=True, **_ALL)
_peft("LoHa", "LoHaConfig", r=2, **_ALL)
_peft("LoKr", "LoKrConfig", r=2, **_ALL)
_peft("IA3", "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
_peft("VeRA", "VeraConfig", r=2, target_modules=["q_proj"])
_peft("BOFT", "BOFTConfig", boft_block_size=4, target_modules=["q_proj"])
_peft("OFT", "OFTConfig", oft_block_size=4, target_modules=["q_proj"])
_peft("FourierFT", "FourierFTConfig", n_frequency=10, target_modules=["q_proj"])
_peft("HRA", "HRAConfig", r=2, target_modules=["q_proj"])
_peft("LN tuning", "LNTuningConfig", target_modules=["input_layernorm"])
_peft("prompt tuning", "PromptTuningConfig", num_virtual_tokens=3)
_peft("prefix tuning", "PrefixTuningConfig", num_virtual_tokens=3)
_peft("P-tuning", "PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8)
_peft("trainable tokens", "TrainableTokensConfig", token_indices=[7, 8, 9], target_modules=["embed_tokens"])
_peft(
    "AdaLoRA, ranks that do not change",
    "AdaLoraConfig",
    init_r=4,
    target_r=2,
    tinit=2,
    tfinal=2,
    deltaT=1,
    total_step=10,
    **_ALL,
)
_peft("RandLoRA", "RandLoraConfig", r=2, target_modules=["q_proj"])
_peft("SHiRA", "ShiraConfig", r=2, target_modules=["q_proj"])


@case("PEFT/two adapters", verdict=refused("saves one adapter; this model has default, second"))
def _two_adapters(run: Run) -> None:
    import peft

    model = peft.get_peft_model(tiny.llama(), peft.LoraConfig(r=2, **_ALL))
    model.add_adapter("second", peft.LoraConfig(r=2, **_ALL))
    run.train(trainer(run, model=model))
