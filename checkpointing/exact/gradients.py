"""Gradients whose bits do not depend on the number of ranks.

A step of V virtual ranks is computed by any number of ranks W ≤ V. Each has a block of consecutive virtual ranks, which
it computes one after the other, each with generators of its own. What they add up is summed in one fixed tree
(`summation`): within a rank in memory, between ranks by a DDP communication hook, bucket by bucket during the last
backward pass. The mean over V is taken once, at the root. In a bare loop, `Shares` are what each of them computes.

Virtual ranks ("EasyScaleThreads") are the idea of Li et al., "EasyScale: Accuracy-consistent Elastic Training for Deep
Learning" (SC '23). There all-reduce keeps the order of a fixed number of logical ranks by communicating for each of
them. New here is the tree: partial sums within a rank leave at most 2 log2(V) of them, and one where blocks are
powers of two, so that a rank sends no more than in a plain all-reduce.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from checkpointing.data.dealing import Dealing
from checkpointing.data.generators import batch_seed, drawing_by
from checkpointing.errors import CheckpointError
from checkpointing.exact.self_test import Buffers, changing
from checkpointing.exact.summation import Exchange, PartialSums
from checkpointing.process import device

_CURRENT = "_checkpointing_exact"
_FORWARD = 0x5EED


def _views(bucket: Any) -> list[torch.Tensor]:
    """Return the bucket's gradients as DDP has laid them out: with their parameters' order of dimensions.

    `bucket.gradients()` has the right places, but takes all of them for contiguous (of torch 2.13, too).
    """
    flat, found = bucket.buffer(), []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        size, stride = parameter.size(), parameter.stride()
        # What is dense without overlaps keeps its order, in DDP's buckets as here.
        is_kept = not parameter.is_contiguous() and torch.empty_like(parameter, device="meta").stride() == stride
        found.append(flat.as_strided(size, stride, gradient.storage_offset()) if is_kept else gradient)
    return found


def _laid_out(flat: torch.Tensor, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return gradients laid out as views of a bucket are."""
    made = torch.zeros_like(flat)
    for view, gradient in zip(views, gradients, strict=True):
        made.as_strided(view.size(), view.stride(), view.storage_offset() - flat.storage_offset()).copy_(gradient)
    return made


class ExactGradients:
    """Sums the gradients of one model. Every rank calls all methods at the same step.

    Args:
        model: The model, wrapped in DDP if there are several ranks.
        virtual_ranks: How many there are.
        seed: What the virtual ranks draw depends on it.
        on_host: Keep the sums of a rank's first virtual ranks in the host's memory.

    Attributes:
        block: The virtual ranks of this rank.

    Raises:
        CheckpointError: There are more ranks than virtual ranks; the model is not wrapped in DDP, or has another
            communication hook.
    """

    def __init__(self, model: torch.nn.Module, virtual_ranks: int, seed: int = 0, *, on_host: bool = False) -> None:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._model, self._seed = model, seed
        self.block = Dealing(virtual_ranks, rank, world_size).block
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        wrapped: Any = model if isinstance(model, DistributedDataParallel) else None
        shared = wrapped is not None and wrapped.gradient_as_bucket_view
        self._sums = PartialSums(parameters, virtual_ranks, shared=shared, on_host=on_host)
        self._parameters = parameters
        # Of a step in a bare loop: the virtual rank whose turn it is, and whether buckets have been summed.
        self._next, self._is_summed = self.block[0], False
        group = wrapped.process_group if wrapped is not None else None
        self._exchange = Exchange(rank, world_size, virtual_ranks, group)
        if wrapped is None:
            if world_size > 1:
                raise CheckpointError("with several ranks, virtual ranks need a model in DistributedDataParallel")
            return
        try:
            # DDP wants the class itself as the annotation of the argument, or none.
            # Once for each model: another training of the same one takes the hook over.
            if not isinstance(getattr(wrapped, _CURRENT, None), ExactGradients):
                wrapped.register_comm_hook(None, lambda _, bucket: getattr(wrapped, _CURRENT)._hook(bucket))
        except RuntimeError as error:
            raise CheckpointError(f"virtual ranks need DDP's communication hook, and it is in use: {error}") from None
        # Not by an assignment, which torch would take for a part of the model.
        wrapped.__dict__[_CURRENT] = self

    @property
    def exchange_bytes(self) -> int:
        """Bytes of memory for the exchange with other ranks: less than the largest bucket, if each has one node."""
        return self._exchange.nbytes

    @property
    def most_sums(self) -> int:
        """Most sets of gradients that this rank has kept of its first virtual ranks."""
        return self._sums.most

    @property
    def module(self) -> torch.nn.Module:
        """The model, without DDP."""
        found = self._model.module if isinstance(self._model, DistributedDataParallel) else self._model
        assert isinstance(found, torch.nn.Module)
        return found

    @contextlib.contextmanager
    def of_rank(self, virtual_rank: int, step: int) -> Iterator[None]:
        """Compute the gradients of a virtual rank in the context: its micro-batches of a step, forward and backward.

        Call it for each of `block`, in order. After the last one, the parameters have the mean gradients of all.

        Raises:
            CheckpointError: It is not its turn, has no gradients, or finds those of another step.
        """
        if virtual_rank == self.block[0]:
            self._begin_step()
        if virtual_rank != self._next:
            raise CheckpointError(
                f"virtual rank {virtual_rank} is not the next one of this step ({self._next}): compute the shares of a "
                "step in their order, once each"
            )
        self._check_none_left()
        is_last = virtual_rank == self.block[-1]
        with contextlib.ExitStack() as stack:
            if not is_last:
                stack.enter_context(self.unsummed())
            stack.enter_context(self.drawing(virtual_rank, step, 0))
            yield
        if isinstance(self._model, DistributedDataParallel) and is_last:
            has_any = self._is_summed
        else:
            has_any = any(parameter.grad is not None for parameter in self._parameters)
        if not has_any:
            raise CheckpointError(
                f"virtual rank {virtual_rank} has no gradients: call backward() in each share, on a loss of the model "
                "as it was passed to the CheckpointManager"
            )
        self.end_of_rank(virtual_rank)
        self._next = virtual_rank + 1

    def _begin_step(self) -> None:
        """Expect the block's first virtual rank, and check that the parameters that require gradients are the same."""
        self._sums.clear()
        self._next, self._is_summed = self.block[0], False
        if isinstance(self._model, DistributedDataParallel):
            # Others of the same model may be used in turns.
            self._model.__dict__[_CURRENT] = self
        now = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if len(now) != len(self._parameters) or any(map(operator.is_not, now, self._parameters)):
            raise CheckpointError(
                "other parameters require gradients now than when shares() was called: freeze and unfreeze layers "
                "before, and take new shares"
            )

    def _check_none_left(self) -> None:
        """Check that the last step's gradients are gone: a virtual rank would take them for its own."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            if bool(parameter.grad.any()):
                raise CheckpointError(
                    f"there are gradients of {name} before the share is computed: call model.zero_grad() in each step, "
                    "or optimizer.zero_grad() if it has all parameters. With virtual ranks, gradients are not "
                    "accumulated over steps: use more virtual ranks, or larger batches"
                )
            # Zeros would be added on some layouts only.
            parameter.grad = None

    @contextlib.contextmanager
    def drawing(self, virtual_rank: int, step: int, number: int) -> Iterator[None]:
        """Have a virtual rank draw from generators of its own in the context: those of a step and a micro-batch."""
        # Not the seeds by which data sets draw.
        seed = batch_seed(self._seed, step, number, virtual_rank) ^ _FORWARD
        states = device.generator_states(1)
        with drawing_by(seed):
            if states:
                # Without an accelerator, it takes longer than all else here: it would note who called.
                torch.manual_seed(seed)
            try:
                yield
            finally:
                device.set_generator_states(states)

    def end_of_rank(self, virtual_rank: int) -> None:
        """Take in the gradients that the parameters have now; after the last one of the block, sum them."""
        if virtual_rank != self.block[-1]:
            self._sums.push(virtual_rank)
            return
        if not isinstance(self._model, DistributedDataParallel):
            self._sum_alone(virtual_rank)
        self._sums.clear()

    def forget(self) -> None:
        """Forget what an unfinished step has added up."""
        self._sums.clear()

    def unsummed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the gradients of what is computed stay on this rank."""
        return self._model.no_sync() if isinstance(self._model, DistributedDataParallel) else contextlib.nullcontext()

    def _sum_alone(self, last: int) -> None:
        """Sum up on the only rank, where there is no DDP, which would refuse this by itself."""
        self._sums.check_used()
        for parameter in self._parameters:
            if parameter.grad is None:
                # As with DDP: what no virtual rank has used is left alone by the optimizer.
                continue
            gradient = parameter.grad.detach()
            (own,) = self._sums.with_last(last, [parameter], [gradient])
            self._exchange.mean(gradient, own)

    def _hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket; DDP calls it in the backward pass of the last virtual rank of the block."""
        self._is_summed = True
        flat, views = bucket.buffer(), _views(bucket)
        values = self._sums.with_last(self.block[-1], bucket.parameters(), views)
        rest = [_laid_out(flat, views, node) for node in values[:-1]]
        self._exchange.mean(flat, [*rest, flat])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future


class Share:
    """What one virtual rank computes of a step; a context, in which its loss is computed and propagated back.

    Attributes:
        batch: Its micro-batch.
        virtual_rank: Its number.
        is_done: Whether it was computed.
    """

    def __init__(self, shares: Shares, virtual_rank: int, batch: Any) -> None:
        self.batch, self.virtual_rank, self.is_done = batch, virtual_rank, False
        self._shares = shares
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Share:
        self._context.enter_context(self._shares.computing(self.virtual_rank))
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self.is_done = error[0] is None


class Shares(Iterator[list[Share]]):
    """The shares of each step that this rank computes.

    Args:
        batches: Virtual rank and micro-batch of each, by step.
        gradients: Of the training.
        last_step: Returns the number of the last step that has ended.
        drawn: Called with this when it has drawn a step.
    """

    def __init__(
        self,
        batches: Iterator[list[tuple[int, Any]]],
        gradients: ExactGradients,
        last_step: Callable[[], int],
        drawn: Callable[[Shares], None] = lambda shares: None,
    ) -> None:
        self._batches, self._gradients, self._last_step, self._notify = batches, gradients, last_step, drawn
        self._drawn: list[Share] = []
        self._is_first = True
        modules = gradients.module.named_modules()
        self._with_statistics = [(name, one) for name, one in modules if isinstance(one, _NormBase)]

    def __next__(self) -> list[Share]:
        self.check_done()
        self._drawn = [Share(self, virtual_rank, batch) for virtual_rank, batch in next(self._batches)]
        self._notify(self)
        return self._drawn

    def check_done(self) -> None:
        """Check that all shares drawn last have been computed: else the gradients are not those of the step."""
        left = [share.virtual_rank for share in self._drawn if not share.is_done]
        if left:
            raise CheckpointError(
                f"{len(left)} of {len(self._drawn)} shares of the step were not computed (virtual ranks "
                f"{', '.join(map(str, left))}): compute the loss of each, and propagate it back, in `with share:`, "
                "before manager.step() and before the next shares are taken"
            )

    def skip(self) -> None:
        """Leave out what was drawn last, if none of it was computed."""
        if not any(share.is_done for share in self._drawn):
            self._drawn = []

    @contextlib.contextmanager
    def computing(self, virtual_rank: int) -> Iterator[None]:
        """Compute the share of a virtual rank in the context; its buffers must not change."""
        for name, module in self._with_statistics:
            if module.training and module.track_running_stats:
                raise CheckpointError(changing((f"the statistics of {name} ({type(module).__name__})",)))
        # In the first one only: what a module keeps of a micro-batch, it keeps of each.
        buffers = Buffers(self._gradients.module) if self._is_first else None
        with self._gradients.of_rank(virtual_rank, self._last_step()):
            yield
        if buffers is not None:
            buffers.check()
        self._is_first = False
