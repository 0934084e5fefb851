"""The order in which DistributedDataParallel sums gradients: a part of the train state.

DDP sums gradients in buckets. With three ranks and more, a gradient's place in its bucket decides in which order the
ranks' values are added, and so the last bits of the sum. A process begins with a layout in the order of the parameters;
after its first backward pass, DDP lays the buckets out once more, in the order in which the gradients became ready on
rank 0, and keeps that. A resumed process would begin with the first layout again, and might end with another one.

So the layout is saved with each snapshot, and put back before the first backward pass of a resumed process. DDP's own
second layout is what rank 0 broadcasts; here the reducer is given a process group that answers this broadcast with the
saved layout. No gradient is computed or sent for it, and no communication hook runs.

See Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3, and
`rebuild_buckets` in torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import BUCKETS_NAME

logger = logging.getLogger("checkpointing")

# What is used of torch that is not documented; torch 2.13 was tried.
_torch: Any = dist
_NAMES = {
    "Reducer": ("_rebuild_buckets", "_push_all_rebuilt_params", "_update_process_group"),
    "Logger": ("set_runtime_stats_and_log", "_get_ddp_logging_data"),
    "DistributedDataParallel": ("_build_params_for_reducer",),
    "": ("_Work", "_DEFAULT_FIRST_BUCKET_BYTES", "_compute_bucket_assignment_by_size"),
}
# Of `_get_ddp_logging_data`.
_IS_FINAL, _LAYOUT, _ITERATION = "has_rebuilt_buckets", "rebuilt_per_bucket_param_indices", "iteration"
_KIND = ("num_parameter_tensors", "total_parameter_size_bytes", "bucket_cap_bytes")

Buckets = tuple[tuple[int, ...], ...]


def _owner(name: str) -> Any:
    """Return the class or module that a row of `_NAMES` is about; None if there is none such."""
    if name == DistributedDataParallel.__name__:
        return DistributedDataParallel
    return getattr(_torch, name, None) if name else _torch


@functools.cache
def missing_names() -> tuple[str, ...]:
    """Return what this release of torch lacks of what is needed here."""
    return tuple(
        f"{owner}.{name}".lstrip(".")
        for owner, names in _NAMES.items()
        for name in names
        if not hasattr(_owner(owner), name)
    )


@dataclass(frozen=True)
class BucketLayout:
    """The layout of one module's gradients.

    Attributes:
        kind: Number of parameters, their size in bytes, and the size of a bucket in bytes: what tells modules apart.
        buckets: Numbers of the parameters in each bucket, as the module counts those that need gradients; None where
            the module lays them out in the order of the parameters, so far.
    """

    kind: tuple[int, ...]
    buckets: Buckets | None = None


# -- the modules of this process -------------------------------------------------------------------------------------

_modules: list[weakref.ref[DistributedDataParallel]] = []
_num_made = 0
_on_new_module: list[Callable[[DistributedDataParallel], None]] = []


def _note(module: torch.nn.Module, name: str, _: Any) -> None:
    global _num_made
    if name == "module" and isinstance(module, DistributedDataParallel):
        _num_made += 1
        _modules.append(weakref.ref(module))
        for listener in list(_on_new_module):
            listener(module)


register_module_module_registration_hook(_note)
if dist.is_available() and dist.is_initialized():
    # Made before this was imported. Not `isinstance`, which may run code of the objects.
    _modules += [weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]


def ddp_modules(parameters: Set[int]) -> list[DistributedDataParallel]:
    """Return the modules that sum gradients of these parameters, in the order in which they were made.

    Of several for one parameter, the newest: others are left from an earlier training, on some ranks perhaps for
    longer than on others.

    Args:
        parameters: Identities (`id`) of the parameters.
    """
    found: list[DistributedDataParallel] = []
    free = set(parameters)
    for reference in reversed(_modules):
        module = reference()
        if module is None:
            _modules.remove(reference)
            continue
        own = {id(parameter) for parameter in module.parameters()}
        # One whose construction has failed has no reducer; one in Python has none that lays anything out.
        is_ready = getattr(module, "logger", None) is not None and getattr(module, "reducer", None) is not None
        if is_ready and own & free:
            found.append(module)
            free -= own
    return found[::-1]


def _trained_parameters(holders: Iterable[Any]) -> set[int]:
    """Return the identities of the parameters of models and optimizers."""
    found: set[int] = set()
    for holder in holders:
        groups = getattr(holder, "param_groups", None) or ()
        found |= {id(parameter) for group in groups for parameter in group["params"]}
        if isinstance(holder, torch.nn.Module):
            found |= set(map(id, holder.parameters()))
    return found


# -- one module ------------------------------------------------------------------------------------------------------


class _Done(getattr(_torch, "_Work", object)):  # type: ignore[misc]
    """Work that is done."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Told(dist.ProcessGroup):
    """A group whose broadcasts bring what rank 0 would have sent: the numbers and their count, then the sizes."""

    def __init__(self, group: dist.ProcessGroup, buckets: Buckets) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        numbers = [number for bucket in buckets for number in bucket]
        self._answers = [[*numbers, len(buckets)], [len(bucket) for bucket in buckets]]
        self._work = _Done()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:  # type: ignore[override]
        tensors[0].copy_(torch.tensor(self._answers.pop(0), dtype=tensors[0].dtype))
        return self._work


def _settings(module: DistributedDataParallel) -> dict[str, Any]:
    kept: Any = module.logger
    data = kept._get_ddp_logging_data()
    return {**data.strs_map, **data.ints_map}


def traits_of(module: DistributedDataParallel) -> tuple[int, ...]:
    """Return what tells a module from others; see `BucketLayout`."""
    settings = _settings(module)
    return tuple(int(settings.get(name, 0)) for name in _KIND)


def _keeps_first_layout(module: DistributedDataParallel) -> bool:
    return bool(module.find_unused_parameters and not module.static_graph)


def current(module: DistributedDataParallel) -> Buckets | None:
    """Return a module's final layout; None as long as it has the first one."""
    kept: Any = module.logger
    kept.set_runtime_stats_and_log()
    settings = _settings(module)
    if not settings.get(_IS_FINAL) or _LAYOUT not in settings:
        return None
    return tuple(tuple(map(int, bucket.split())) for bucket in settings[_LAYOUT].split(","))


def impose(module: DistributedDataParallel, buckets: Buckets) -> bool:
    """Give a module its final layout; return whether it had none."""
    reducer, group = module.reducer, module.process_group
    told = _Told(group, buckets)
    reducer._push_all_rebuilt_params()
    reducer._update_process_group(told)
    try:
        return bool(reducer._rebuild_buckets())
    finally:
        reducer._update_process_group(group)


def settle(module: DistributedDataParallel) -> Buckets | None:
    """Have a module lay its buckets out now, and not when the next forward pass begins; all ranks call this together.

    Otherwise a snapshot in between would be of a state that no new process can be put into. Of a static graph, torch
    knows the order only after the second backward pass; after the first one it is laid out as the parameters, the last
    one first.

    Returns:
        The final layout; None where no gradients have been summed yet.
    """
    module.reducer._rebuild_buckets()
    buckets = current(module)
    if buckets is None and module.static_graph and _settings(module).get(_ITERATION):
        impose(module, _last_first(module))
        buckets = current(module)
    return buckets


def _last_first(module: Any) -> Buckets:
    parameters, is_sparse = module._build_params_for_reducer()
    order = list(range(len(parameters)))[::-1]
    first, cap = _torch._DEFAULT_FIRST_BUCKET_BYTES, _settings(module)["bucket_cap_bytes"]
    found, _ = _torch._compute_bucket_assignment_by_size(
        [parameters[number] for number in order], [min(first, cap), cap], [is_sparse[number] for number in order], order
    )
    return tuple(tuple(bucket) for bucket in found)


# -- all modules of a training ---------------------------------------------------------------------------------------


class DdpBuckets:
    """The layouts of all modules of a training; every rank calls all methods at the same step.

    Args:
        is_first: Whether this is rank 0, which warns.
    """

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first
        self._holders: list[Any] = []
        self._known: tuple[int, list[weakref.ref[DistributedDataParallel]]] = (-1, [])
        self._final: weakref.WeakKeyDictionary[DistributedDataParallel, Buckets] = weakref.WeakKeyDictionary()
        # Put back, and not yet seen in what DDP says of itself.
        self._unproven: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        # What the checkpoint has for modules that have not been made yet.
        self._left: list[BucketLayout] = []
        self._has_warned = False

    def track(self, holders: Iterable[Any]) -> None:
        """Set what is trained: models and optimizers, among other objects."""
        self._holders = list(holders)
        self._known = (-1, [])

    def _modules(self) -> list[DistributedDataParallel]:
        if self._known[0] != _num_made:
            found = ddp_modules(_trained_parameters(self._holders))
            self._known = (_num_made, list(map(weakref.ref, found)))
        return [module for module in (reference() for reference in self._known[1]) if module is not None]

    def restore(self, point: LoadedCheckpoint) -> None:
        """Put back the layouts in a checkpoint, also those of modules that are made later.

        Raises:
            InvalidCheckpoint: The file cannot be parsed.
        """
        if not point.has(BUCKETS_NAME):
            if not all(map(_keeps_first_layout, self._modules())):
                self._warn(f"{point.label} is of an older version, and has no order of gradient buckets")
            return
        found = point.json(BUCKETS_NAME)
        with point.reading(BUCKETS_NAME):
            self._left = parsed(found)
        if self._left and missing_names():
            self._warn(f"torch {torch.__version__} has no {', '.join(missing_names())}")
            return
        for module in self._modules():
            self._put_back(module)
        if self._left and self._await_first_forward not in _on_new_module:
            _on_new_module.append(self._await_first_forward)

    def _await_first_forward(self, module: DistributedDataParallel) -> None:
        """Put back the layout of a module that was made later, whose reducer is not there yet."""

        # The compiler of a wrapped module traces its hooks, and cannot trace this one.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: DistributedDataParallel, *_: Any) -> None:
            hook.remove()
            if module in self._modules():
                self._put_back(module)

        hook = module.register_forward_pre_hook(before, prepend=True)

    def _put_back(self, module: DistributedDataParallel) -> None:
        kind = traits_of(module)
        layout = next((layout for layout in self._left if layout.kind == kind), None)
        if layout is None:
            return
        self._left.remove(layout)
        if layout.buckets is None or module in self._final:
            return
        if sorted(number for bucket in layout.buckets for number in bucket) != list(range(kind[0])):
            self._warn("the checkpoint's order of gradient buckets is of other parameters")
        elif impose(module, layout.buckets) or current(module) == layout.buckets:
            self._final[module] = layout.buckets
            self._unproven.add(module)
        else:
            self._warn("DistributedDataParallel had computed gradients before the checkpoint was restored")

    def end_of_step(self) -> None:
        """Have modules that have summed gradients for the first time lay their buckets out."""
        if missing_names():
            return
        for module in self._modules():
            if (module in self._final and module not in self._unproven) or _keeps_first_layout(module):
                continue
            found = settle(module)
            if found is None:
                continue
            if self._final.setdefault(module, found) != found:
                self._warn("DistributedDataParallel did not keep the order of gradient buckets that was put back")
                self._final[module] = found
            self._unproven.discard(module)

    def files(self) -> dict[str, bytes]:
        """Return the file with the layouts of all modules; empty where there are none."""
        layouts = [BucketLayout(traits_of(module), self._final.get(module)) for module in self._modules()]
        return {BUCKETS_NAME: written(layouts)} if layouts else {}

    def close(self) -> None:
        """Forget what the checkpoint has for modules that were never made."""
        if self._await_first_forward in _on_new_module:
            _on_new_module.remove(self._await_first_forward)

    def _warn(self, why: str) -> None:
        if self._is_first and not self._has_warned:
            logger.warning(
                "%s: on three ranks and more, the resumed run sums gradients in another order than the uninterrupted "
                "one, and its last bits differ",
                why,
            )
        self._has_warned = True


def written(layouts: Sequence[BucketLayout]) -> bytes:
    """Return the file of layouts."""
    return json.dumps({"modules": [{"kind": one.kind, "buckets": one.buckets} for one in layouts]}).encode()


def parsed(document: dict[str, Any]) -> list[BucketLayout]:
    """Read the file of layouts; raises an error of any kind where it is none."""
    return [
        BucketLayout(
            tuple(map(int, one["kind"])),
            None if one["buckets"] is None else tuple(tuple(map(int, bucket)) for bucket in one["buckets"]),
        )
        for one in document["modules"]
    ]
