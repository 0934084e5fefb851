"""Models of which only a part is trained (LoRA and similar): that part is saved, and its base is identified.

A base that changes all the same is saved, too: an adapter that is merged for generation, and unmerged again, leaves the
weights of its layers rounded twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping

import torch

from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import ADAPTER_NAME
from checkpointing.state.samples import Sampler, named_tensors
from checkpointing.state.tensor_fingerprint import fingerprint

logger = logging.getLogger("checkpointing")

# Identifies the base that an adapter was trained on; in the same checkpoint.
BASE_NAME = "base_model.json"
# Of the further states: the base, once training has changed it.
BASE_STATE = "base_weights"
_MAX_NAMES = 3

Tensors = Mapping[str, torch.Tensor]


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a model saves, by their names in its state dict.

    This does not call `state_dict`: modules of a quantised base would compute values that are not needed here
    (bitsandbytes' nested quantisation makes the host wait for the device once per layer).
    """
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


class Adapter:
    """The part of a model that is saved. Use one per training, since it reads the base once.

    Args:
        select: Returns what is saved of a model's state dict, by reference, under the names in the file.
        base_name: Name of the base, for messages.
    """

    def __init__(self, select: Callable[[Tensors], dict[str, torch.Tensor]], base_name: str = "") -> None:
        self._select, self._base_name = select, base_name
        self._identity: dict[str, str] | None = None
        # Of the base as training began.
        self._samples: list[torch.Tensor] | None = None
        self._base_changes = False

    def weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return what is saved of a model, by reference, under the names in the file.

        Raises:
            CheckpointError: Nothing is.
        """
        found = self._select(live_tensors(model))
        if not found:
            raise CheckpointError(
                f"no weight of the adapter was found in the model, a {type(model).__name__}: its parameters have other "
                "names than those of the PEFT model in it. Give it without the wrapper around it"
            )
        return found

    def identify(self, model: torch.nn.Module) -> bytes:
        """Return the contents of BASE_NAME: name and digest of everything that is not trained; reads it all, once.

        All ranks call it together if the model is sharded.
        """
        if self._identity is None:
            base = self._base(model)
            # All ranks come here at the same step, and gather a sharded base one tensor after the other.
            whole = (sharding.gathered(tensor).detach() for tensor in base.values())
            sums = fingerprint(t.contiguous().reshape(-1).view(torch.uint8) for t in whole).tolist()
            entries = sorted(
                (name, str(tensor.dtype), list(sharding.shape_of(tensor)), total)
                for (name, tensor), total in zip(base.items(), sums, strict=True)
            )
            digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
            self._identity = {"name_or_path": self._base_name, "digest": digest}
        return json.dumps(self._identity).encode()

    def begin(self, model: torch.nn.Module) -> None:
        """Note what the base is as training begins; all ranks call it together if the model is sharded."""
        self.identify(model)
        self._samples = _samples_of(self._base(model))

    def changed_base(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the base by reference, if something has changed it since training began; otherwise nothing.

        Only samples of it are compared, as reading all of it takes too long for each snapshot. All ranks that hold
        the same take the same samples.

        Raises:
            CheckpointError: It cannot be saved: its weights are quantised or sharded, or the adapter is merged into it.
        """
        base = self._base(model)
        if not self._base_changes:
            if self._samples is None or _are_equal(self._samples, _samples_of(base)):
                return {}
            logger.warning(
                "training has changed the base of the adapter: it is saved whole with the adapter from now on. Merging "
                "and unmerging an adapter rounds the weights; a copy of the model to merge into would leave them alone"
            )
            self._base_changes = True
        if any(getattr(module, "merged", False) is True for module in model.modules()):
            raise CheckpointError(
                "the adapter is merged into its base, which a resumed run would not know: it would add the adapter "
                "once more. Unmerge it (unmerge_adapter) before the step is saved"
            )
        odd = [name for name, one in base.items() if sharding.is_sharded(one) or not one.is_floating_point()]
        if odd:
            raise CheckpointError(
                f"training has changed the base of the adapter, which cannot be saved: {odd[0]} is quantised or "
                "sharded. Merge the adapter into a copy of the model, or do not merge it during training"
            )
        return {name: tensor.detach() for name, tensor in base.items()}

    def _base(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters that are not saved, by name."""
        saved = {id(tensor) for tensor in self.weights(model).values()}
        # A callback may have added further adapters: a teacher that follows the model.
        adapters = set(getattr(model, "peft_config", ()))
        # Buffers may change, and a layer that PEFT wraps for the adapter has another name. Of a module that is
        # trained whole, PEFT keeps the original, which is not used and may have been initialised at random.
        return {
            name.replace(".base_layer", ""): tensor
            for name, tensor in live_tensors(model).items()
            if isinstance(tensor, torch.nn.Parameter)
            and id(tensor) not in saved
            and ".original_module." not in name
            and adapters.isdisjoint(name.split("."))
        }

    def restore(self, model: torch.nn.Module, point: LoadedCheckpoint) -> dict[int, torch.Tensor]:
        """Copy the saved part into the model.

        Returns:
            What was saved of each of the model's tensors, by its identity.

        Raises:
            CheckpointError: The part was trained on another base, or is another adapter.
        """
        state = point.model_state(ADAPTER_NAME)
        now, then = json.loads(self.identify(model)), point.json(BASE_NAME)
        own = self.weights(model)
        differing = sorted(
            name for name in own.keys() | state.keys() if name not in own or name not in state
            or sharding.shape_of(own[name]) != tuple(state[name].shape)
        )  # fmt: skip
        if differing:
            names = ", ".join(differing[:_MAX_NAMES]) + (", …" if len(differing) > _MAX_NAMES else "")
            raise CheckpointError(
                f"{point.label} holds another adapter: {len(differing)} of its weights are missing here, or of another "
                f"shape ({names}). Use the method that wrote it, or another output_dir."
            )
        if then.get("digest") != now["digest"]:
            raise CheckpointError(
                f"{point.label} was trained on another base model ({BASE_NAME}: {_called(then)}) than this one "
                f"({_called(now)}): their weights differ. Load that base, in the same precision, or train in another "
                "output_dir."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                sharding.fill(tensor, point.cut(ADAPTER_NAME, state[name], tensor, in_place=True))
        self._restore_base(model, point)
        return {id(tensor): state[name] for name, tensor in own.items()}

    def _restore_base(self, model: torch.nn.Module, point: LoadedCheckpoint) -> None:
        if not point.has(f"{BASE_STATE}.pt"):
            return
        base, saved = self._base(model), point.torch_object(f"{BASE_STATE}.pt")
        with point.reading(f"{BASE_STATE}.pt"), torch.no_grad():
            for name, tensor in base.items():
                tensor.copy_(saved[name])
        self._base_changes = True


def _samples_of(base: Tensors) -> list[torch.Tensor]:
    """Return words of tensors, at places that are the same each time and on each rank."""
    held = ((name, tensor, sharding.fragment_of(tensor)) for name, tensor in base.items())
    # bitsandbytes packs what it has quantised in another way when it evaluates on the CPU.
    watched = {
        name: tensor if fragment is None else fragment.tensor
        for name, tensor, fragment in held
        if tensor.is_floating_point() or tensor.device.type != "cpu"
    }
    return [values.cpu() for values in Sampler(seed=0).hand_over(list(named_tensors(watched, "base"))).values]


def _are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _called(identity: Mapping[str, object]) -> str:
    return ascii(identity.get("name_or_path") or "built from scratch")[:200]
