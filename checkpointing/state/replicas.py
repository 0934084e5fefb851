"""Compares the ranks' state, of which a checkpoint holds one copy. Runs in the copy thread of every rank."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from checkpointing.errors import ReplicasDrifted
from checkpointing.files import sharding
from checkpointing.files.file_images import FileImage, layout_digest
from checkpointing.files.sharding import Part
from checkpointing.format.layout import EXTRA_STATE_NAME, OPTIONS_NAME, SCALER_NAME, SCHEDULER_NAME, rank_object_name
from checkpointing.process.ranks import Ranks
from checkpointing.state.captured_state import CapturedState
from checkpointing.state.tensor_fingerprint import fingerprint

_BY_DESIGN = (
    "Where ranks differ by design (local SGD, averaging every N steps), save right after an average (save_steps=N), "
    "or keep each rank's own state: check_replicas=False, states={'own_model': model, 'own_optimizer': optimizer}."
)


class ReplicaComparison:
    """Collective comparisons of one step's state; every rank calls the same methods in the same order.

    Args:
        ranks: This rank, with a group that only the copy thread uses.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def gather_files(self, step: int, own: dict[str, bytes], images: Sequence[FileImage]) -> dict[str, bytes]:
        """Return all ranks' own small files, by name.

        Args:
            step: Step of the snapshot, for the message.
            own: This rank's files.
            images: Images of the files that all ranks write together.

        Raises:
            ReplicasDrifted: The ranks lay a file out differently, so that each would write its part elsewhere.
        """
        if self._ranks.group is None:
            return own
        layouts = layout_digest(images)
        everyone = self._ranks.gather((own, layouts))
        for name in layouts:
            who = describe_differing_ranks([[theirs.get(name)] for _, theirs in everyone])
            if who is not None:
                raise ReplicasDrifted(
                    f"step {step}: {who} in the shapes or names of what {name} holds. No checkpoint is made of this "
                    "state; resume from the one before. Look for code that gives the ranks different optimizer "
                    "options, parameters or further states."
                )
        return {name: data for files, _ in everyone for name, data in files.items()}

    def differing_names(self, state: CapturedState, foreign: Mapping[str, FileImage]) -> frozenset[str]:
        """Return the names of buffers, further states and files of small objects that are not equal on all ranks.

        Args:
            state: The state of the step.
            foreign: Images of the further states, by name.
        """
        if self._ranks.group is None:
            return frozenset()
        buffers = {
            name: tensor
            for name in sorted(state.buffers)
            if not sharding.is_stand_in(tensor := state.model[name], state.parts)
        }
        sums = fingerprint(_flat(tensor) for tensor in buffers.values()).tolist()
        for image in foreign.values():
            # One number for each, since their structure may differ, too.
            tensors = fingerprint(tensor for _, tensor in image.tensors).tolist()
            text = repr((tensors, image.nbytes)).encode() + b"".join(data for _, data in image.literals)
            sums.append(number_of(text))
        sums += numbers_of(state.small)
        names = [*buffers, *foreign, *OBJECTS]
        return frozenset(names[number] for number in self._differing(torch.tensor(sums, dtype=torch.int64)))

    def check_parts_equal(self, step: int, state: CapturedState, changed: Callable[[], int]) -> int:
        """Check that ranks which hold the same parts of sharded tensors hold the same values.

        What is distributed in one way is compared as a whole. Where no two ranks hold the same parts, as with FSDP2
        over all of them, nothing is read.

        Args:
            step: Step of the snapshot, for the message.
            state: The state of the step.
            changed: As for `check_equal`.

        Returns:
            As `check_equal`.

        Raises:
            ReplicasDrifted: Ranks hold different values.
        """
        names = {id(state.parts[key]): name for name, key in _stand_ins_by_name(state)}
        kinds: dict[str, list[Part]] = {}
        # These are kept for each rank where they differ.
        buffers = {key for name, key in _stand_ins_by_name(state) if name in state.own_buffers}
        for key, part in state.parts.items():
            if key not in buffers:
                kinds.setdefault(part.distribution, []).append(part)
        regions = {kind: _digest(repr([part.region for part in parts])) for kind, parts in kinds.items()}
        held = self._ranks.gather(regions)
        shared = [
            kind
            for kind in sorted(regions.keys() | set().union(*held))
            if len({other.get(kind) for other in held}) < len(held)
        ]
        if not shared:
            return 0
        sums = {kind: fingerprint(_flat(part.tensor) for part in kinds.get(kind, ())).tolist() for kind in shared}
        everyone = self._ranks.gather({kind: _digest(repr(sums[kind])) for kind in shared})
        groups = {
            (kind, region): [rank for rank, other in enumerate(held) if other.get(kind) == region]
            for kind in shared
            for region in {other.get(kind) for other in held}
            if region is not None
        }
        odd = [
            (kind, ranks) for (kind, _), ranks in groups.items() if len({everyone[rank][kind] for rank in ranks}) > 1
        ]
        if not odd:
            return 0
        most = max(self._ranks.gather(changed()))
        if most:
            return most
        kind, ranks = min(odd, key=lambda item: (item[1], item[0]))
        tensors = self._ranks.gather(sums[kind])
        first = next(n for n in range(len(tensors[ranks[0]])) if len({tensors[rank][n] for rank in ranks}) > 1)
        name = self._ranks.gather(names.get(id(kinds[kind][first]), "the optimizer's state") if kind in kinds else "")
        num_values = len({tensors[rank][first] for rank in ranks})
        raise ReplicasDrifted(
            f"step {step}: ranks {', '.join(map(str, ranks))} hold the same part of {name[ranks[0]]}, but with "
            f"{num_values} different values. No checkpoint is made of this state; resume from the "
            "one before. If it happens again, look for code that changes parameters on one rank only, for gradients "
            f"that are not reduced over all replicas, or for faulty memory. {_BY_DESIGN}"
        )

    def check_equal(self, step: int, state: CapturedState, optimizer: FileImage, changed: Callable[[], int]) -> int:
        """Check that parameters and optimizer state are equal on all ranks.

        Args:
            step: Step of the snapshot, for the message.
            state: The state of the step.
            optimizer: Image of the optimizer's file.
            changed: Counts the tensors that this rank has changed since the state was captured.

        Returns:
            0 where the state is equal; otherwise the number of tensors that some rank has changed meanwhile, which
            makes the comparison void.

        Raises:
            ReplicasDrifted: The ranks hold different state.
        """
        parameters = {
            name: tensor
            for name, tensor in state.model.items()
            if name in state.parameters and not sharding.is_stand_in(tensor, state.parts)
        }
        names = [*parameters, *(f"the optimizer's state (byte {offset})" for offset, _ in optimizer.tensors)]
        flat = [_flat(tensor) for tensor in parameters.values()]
        mine = fingerprint([*flat, *(tensor for _, tensor in optimizer.tensors)])
        differing = self._differing(mine)
        if not differing:
            return 0
        everyone = self._ranks.gather((changed(), mine[differing].tolist()))
        most = max(changed for changed, _ in everyone)
        if most:
            return most
        who = describe_differing_ranks([sums for _, sums in everyone])
        raise ReplicasDrifted(
            f"step {step}: {who} in {len(differing)} of {len(names)} tensors, first in {names[differing[0]]}. No "
            "checkpoint is made of this state; resume from the one before. If it happens again, look for code that "
            f"changes parameters on one rank only, or for faulty memory. {_BY_DESIGN}"
        )

    def _differing(self, mine: torch.Tensor) -> list[int]:
        """Return the positions at which the ranks' numbers differ."""
        extremes = self._ranks.maximum(torch.stack([mine, -mine]))
        found: list[int] = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
        return found


def describe_differing_ranks(values: Sequence[Sequence[object]]) -> str | None:
    """Name the ranks that differ from the majority; None where all are equal. `values` are all ranks', by rank."""
    counted = collections.Counter(map(tuple, values))
    if len(counted) == 1:
        return None
    usual, number = counted.most_common(1)[0]
    odd = [str(rank) for rank, own in enumerate(values) if tuple(own) != usual]
    if 2 * number <= len(values):
        return f"the {len(values)} ranks hold different values"
    one = len(odd) == 1
    return f"rank{'' if one else 's'} {', '.join(odd)} hold{'s' if one else ''} other values than the others"


def _stand_ins_by_name(state: CapturedState) -> Iterator[tuple[str, int]]:
    """Yield name and key in `parts` of the model's sharded tensors."""
    for name, tensor in state.model.items():
        if sharding.is_stand_in(tensor, state.parts):
            yield name, tensor.untyped_storage()._cdata


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# Each rank of a pipeline has its own; others may, by the script's choice.
OBJECTS = (SCHEDULER_NAME, SCALER_NAME, EXTRA_STATE_NAME, OPTIONS_NAME)


def numbers_of(small: Mapping[str, bytes]) -> list[int]:
    """Return one number for each of `OBJECTS`, by which ranks compare them; 0 for what there is not."""
    return [number_of(small[name]) if name in small else 0 for name in OBJECTS]


def number_of(data: bytes) -> int:
    """Return a number that is equal for equal bytes, and whose negative fits into 64 bits, too."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), signed=True) >> 1


def own_objects(small: Mapping[str, bytes], differing: frozenset[str], rank: int) -> dict[str, bytes]:
    """Return this rank's files of those objects that differ.

    Args:
        small: All its small files, by name.
        differing: Names of files that are not equal on all ranks.
        rank: Number of this rank.
    """
    return {rank_object_name(name, rank): small[name] for name in OBJECTS if name in differing and name in small}


def differing_buffers(buffers: Mapping[str, torch.Tensor], ranks: Ranks) -> set[str]:
    """Return the names of buffers that are not equal on all ranks that have them; called by all ranks.

    Args:
        buffers: This rank's, by name.
        ranks: This rank among all.
    """
    numbers = fingerprint(value.contiguous().reshape(-1).view(torch.uint8) for value in buffers.values()).tolist()
    found: dict[str, set[int]] = {}
    for theirs in ranks.gather(dict(zip(buffers, numbers, strict=True))):
        for name, number in theirs.items():
            found.setdefault(name, set()).add(number)
    return {name for name, different in found.items() if len(different) > 1}
