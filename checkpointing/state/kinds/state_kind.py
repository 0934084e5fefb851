"""How ranks hold the state of model and optimizer, and what of a checkpoint each restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.process.ranks import Ranks
from checkpointing.process.trees import tensors_in
from checkpointing.state.param_names import matched_to
from checkpointing.state.weights import load_whole


class StateKind:
    """One way in which ranks hold the state. What a class does not say, is as where each rank holds all of it.

    Args:
        model: The model.
        optimizer: Its optimizer, without accelerate's wrapper.
        ranks: This rank, with a group that the training thread uses.

    Attributes:
        model: The module whose names a checkpoint has.
        optimizer: What has `state_dict` and `load_state_dict` in the form of `torch.optim.Optimizer`.
        is_cut: Whether ranks hold parts, which they save and restore together.
        is_cut_late: Whether these parts are cut by the copy thread, as they take no new memory and stay where they are.
        is_kept: Whether the state stays of this kind; others are found again, as `fully_shard` changes a model.
        has_own_buffers: Whether ranks have buffers that others lack.
    """

    is_cut = False
    is_cut_late = False
    is_kept = False
    has_own_buffers = False

    def __init__(self, model: Any, optimizer: Any, ranks: Ranks) -> None:
        self.model, self.optimizer = model, optimizer

    @classmethod
    def matches(cls, model: Any, *, pipeline: bool) -> bool:
        """Return whether a model is held in this way; see `kind_of`."""
        raise NotImplementedError

    def is_of(self, model: Any, optimizer: Any) -> bool:
        """Return whether this is that of a model, or of an optimizer, so that none need be made again."""
        return False

    # -- saving --------------------------------------------------------------------------------------------------------

    @property
    def base_optimizer(self) -> Any:
        """The optimizer whose step changes the state: torch calls the pre-step barrier before it if it is torch's."""
        return self.optimizer

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer has."""
        groups = getattr(self.optimizer, "param_groups", [])
        return [parameter for group in groups for parameter in group["params"]]

    @property
    def masters(self) -> Mapping[str, Any]:
        """The parameters in full precision, by name, where the optimizer has these besides."""
        return {}

    def is_spread(self, local_world_size: int) -> bool:
        """Return whether some node does not hold all of the state, as far as this rank knows.

        Args:
            local_world_size: Number of ranks on each node.
        """
        return False

    def weights(self, live: Mapping[str, torch.Tensor], local_world_size: int) -> Mapping[str, Any]:
        """Return this rank's weights as tensors or fragments of the whole model's, under its names.

        Args:
            live: The weights, by name.
            local_world_size: Number of ranks on each node, which share the writing; or more, if one writes for all.
        """
        return live

    def optimizer_state(self, state: Any, local_world_size: int) -> Any:
        """Return the optimizer's state dict likewise, with the numbers that the whole model's would have.

        Args:
            state: What `optimizer.state_dict()` has returned, in containers of its own.
            local_world_size: See `weights`.
        """
        return state

    def files(self, state: Any) -> dict[str, bytes]:
        """Return small files of this kind, by name, of an optimizer's state dict."""
        return {}

    def complete(
        self, model: Mapping[str, torch.Tensor], optimizer: Any, parts: sharding.Parts, ranks: Ranks
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Return model and optimizer state with stand-ins for what only other ranks have; called by all ranks.

        Args:
            model: This rank's weights, by name, with stand-ins.
            optimizer: This rank's optimizer state, with stand-ins.
            parts: What this rank holds; receives nothing of what is added.
            ranks: This rank, with a group that only the copy thread uses.
        """
        return dict(model), optimizer

    def expected_bytes(self, saved: list[torch.Tensor] | None, local_world_size: int, node_share: float) -> int:
        """Estimate the size of a node's snapshot, as far as it can be known before the first optimizer step.

        Args:
            saved: The tensors that are saved of the model; None for all.
            local_world_size: Number of ranks on each node.
            node_share: Share of the ranks that a node has where the state is spread over nodes; 1 otherwise.
        """

        def nbytes(tensor: Any) -> int:
            is_part = node_share < 1 and sharding.is_sharded(tensor)
            return sharding.own_nbytes(tensor) * local_world_size if is_part else sharding.nbytes_of(tensor)

        parameters = list(self.model.parameters())
        model = sum(map(nbytes, saved or [*parameters, *self.model.buffers()]))
        tensors = tensors_in(self.optimizer.state_dict())
        state = sum({id(t) if sharding.is_sharded(t) else t.data_ptr(): nbytes(t) for t in tensors}.values())
        if not state:
            defaults = getattr(self.optimizer, "defaults", {})
            moments = 2 + bool(defaults.get("amsgrad")) if "betas" in defaults else int(bool(defaults.get("momentum")))
            state = moments * sum(nbytes(value) for value in parameters if value.requires_grad)
        return model + state

    # -- restoring -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Bring the model into the form that weights are restored into."""

    def load_weights(self, point: LoadedCheckpoint, place: Callable[[Any], Any]) -> Mapping[str, torch.Tensor]:
        """Load all of the model's weights.

        Args:
            point: The state to load from.
            place: Moves a state dict to the device where it is wanted.

        Returns:
            What the checkpoint holds of them, by name, where `restore_masters` needs it.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        load_whole(self.model, point, place)
        return {}

    def restore_masters(self, point: LoadedCheckpoint, sources: Mapping[str, tuple[str, torch.Tensor]]) -> None:
        """Load the parameters in full precision, where the optimizer has these besides.

        Args:
            point: The state to load from.
            sources: For each parameter a file, and what was parsed from it: the most precise of the checkpoint.

        Raises:
            CheckpointError: The bytes were altered, or cannot be read now.
        """

    def own_state(self, state: Any) -> Any:
        """Return what this rank's optimizer loads of the state dict in a checkpoint.

        Raises:
            ValueError: It is of another kind of optimizer, or of other parameters.
        """
        return matched_to(self.optimizer, self.model, state)

    def restore_options(self, point: LoadedCheckpoint) -> bool:
        """Restore the options of the optimizer's groups, where each rank has its own.

        Returns:
            Whether this rank may restore what the checkpoint has of its own: it holds what the rank of its number held.

        Raises:
            InvalidCheckpoint: A file cannot be parsed.
        """
        return True


class WholeState(StateKind):
    """Each rank holds all of the state: a single process, or DDP."""

    @classmethod
    def matches(cls, model: Any, *, pipeline: bool) -> bool:
        """Return True."""
        return True
