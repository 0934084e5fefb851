"""A model, and ways to save it that several benchmarks compare. Needs torch alone: a peer has its own environment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Decoder(nn.Module):
    """A language model, of which only the size of its state matters; a number of layers is a transformer's."""

    def __init__(self, width: int, layers: nn.Module | int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        if isinstance(layers, int):
            layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
            layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.layers = layers
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights and of AdamW's two moments."""
    return 3 * sum(parameter.nbytes for parameter in model.parameters())


def loss_of(model: Any, num_tokens: int, vocabulary: int) -> torch.Tensor:
    """Return the loss of random tokens."""
    tokens = torch.randint(0, vocabulary, (1, num_tokens))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Method:
    """A way to save, here none, and the seconds that each save has `blocked` training.

    `save` is called after a step, and `before_optimizer` before the next step changes the state.
    """

    def __init__(self, model: Any, optimizer: Any, folder: Path | str) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, Path(folder)
        self.blocked: list[float] = []
        self.durable: dict[int, float] = {}
        self.began: dict[int, float] = {}

    def timed_save(self, step: int) -> None:
        self.began[step] = time.time()
        began = time.perf_counter()
        self.save(step)
        self.blocked.append(time.perf_counter() - began)

    def timed_wait(self) -> None:
        """Wait before the optimizer's step; it belongs to the save before, and is 0 in the steps that follow."""
        began = time.perf_counter()
        self.before_optimizer()
        if self.blocked:
            self.blocked[-1] += time.perf_counter() - began

    def resume(self) -> int:
        return 0

    def save(self, step: int) -> None:
        pass

    def before_optimizer(self) -> None:
        pass

    def after_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        """Return when the last save is durable."""

    def close(self) -> None:
        pass

    def note_durable(self, step: int) -> None:
        self.durable.setdefault(step, time.time() - self.began[step])


class Dcp(Method):
    """`torch.distributed.checkpoint.async_save`, by a thread or a process.

    The copy of the state may be in shared memory, and may be made while training continues.
    """

    def __init__(
        self, *args: Any, process: bool = False, shared_memory: bool = False, async_staging: bool = False
    ) -> None:
        super().__init__(*args)
        self.process = process
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if not dist.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29533")
            dist.init_process_group("gloo", rank=0, world_size=1)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shared_memory,
                use_async_staging=async_staging,
                use_non_blocking_copy=False,
            )
        )
        self.upload: Any = None
        self.staging: Any = None

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        self.finish()
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        response = async_save(
            self.state(),
            checkpoint_id=str(self.folder / str(step)),
            async_checkpointer_type=kind,
            async_stager=self.stager,
        )
        self.upload = getattr(response, "upload_completion", response)
        self.staging = getattr(response, "staging_completion", None)
        self.upload.add_done_callback(lambda _: self.note_durable(step))

    def before_optimizer(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def finish(self) -> None:
        if self.upload is not None:
            self.upload.result()

    def close(self) -> None:
        self.stager.close()


class ProtectedDcp(Dcp):
    """The same, with `checkpointing.dcp.protect`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from torch.distributed.checkpoint import state_dict_saver

        from checkpointing.dcp import protect

        protect()
        saving: Any = state_dict_saver
        self.copies = saving._ThreadBasedAsyncCheckpointExecutor.args[0]

    # The optimizer's own hook waits here; calling it measures the wait.
    def before_optimizer(self) -> None:
        if self.copies._thread is not None:
            self.copies._thread.pre_step_barrier()


class Ours(Method):
    """`CheckpointManager`."""

    def __init__(self, model: Any, optimizer: Any, location: Path | str) -> None:
        super().__init__(model, optimizer, location)
        from checkpointing import CheckpointManager

        # Not a path: it may be in object storage.
        self.manager = CheckpointManager(
            str(location), model=model, optimizer=optimizer, snapshot_steps=None, keep_last=2
        )

    def resume(self) -> int:
        return self.manager.resume()

    def save(self, step: int) -> None:
        self.manager.save(step, step)

    def after_step(self, step: int) -> None:
        self.manager.end_of_step(step)

    # The optimizer's own hook waits here; calling it measures the wait.
    def before_optimizer(self) -> None:
        self.manager._node.snapshots._copy_thread.pre_step_barrier()

    def finish(self) -> None:
        self.manager.wait_for_commit()

    def close(self) -> None:
        self.manager.close()
