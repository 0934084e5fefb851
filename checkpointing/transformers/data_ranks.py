"""How the ranks of a trainer share the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from checkpointing.agent.events import BatchShape
from checkpointing.host.environment import rank_settings


@dataclass(frozen=True)
class DataRanks:
    """The data parallel ranks. With tensor parallelism, all ranks of a group are one: they compute the same samples.

    Attributes:
        rank: Number of this one.
        count: How many there are.
        group_size: Ranks that are one.
    """

    rank: int = 0
    count: int = 1
    group_size: int = 1

    @classmethod
    def of(cls, trainer: Any) -> DataRanks:
        """Return those of a trainer. accelerate's meshes have the tensor parallel ranks next to each other."""
        size = tensor_parallel_size(trainer)
        return cls(trainer.args.process_index // size, trainer.args.world_size // size, size)

    @property
    def planned(self) -> int:
        """How many ranks the batch is meant for; an elastic run may begin with fewer."""
        return rank_settings().planned_ranks // self.group_size or self.count


def tensor_parallel_size(trainer: Any) -> int:
    """Return how many ranks share each layer: by how transformers has loaded the model, or by accelerate's mesh."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return getattr(trainer.model, "_tp_size", None) or getattr(parallelism, "tp_size", None) or 1


def batch_shape(trainer: Any, shared_samples: int | None) -> BatchShape:
    """Return how the steps of a trainer are cut, for the supervisor.

    Args:
        trainer: The trainer.
        shared_samples: Samples of a step that any number of ranks can share; None if they must divide it.
    """
    return BatchShape(
        micro_batch=trainer._train_batch_size,
        accumulation=trainer.args.gradient_accumulation_steps,
        samples=shared_samples,
        model_ranks=tensor_parallel_size(trainer),
    )
