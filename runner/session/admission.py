"""Which nodes take part in the next attempt of an elastic run.

They are enough, their ranks can share the samples of a step, and their machines' hardware has not failed in the run.
`admit` and `change` are pure: what is known goes in, a decision comes out.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from checkpointing.agent.events import BatchShape
from checkpointing.commit.catalog import Catalog
from runner.config.schema import Config, LaunchConfig
from runner.errors import UsageError
from runner.recovery.policy import BatchDivision
from runner.recovery.restart_state import RestartState
from runner.session.identity import JobIdentity

# A node of the last attempt that is still connected has its processes ready within this time, or counts as lost.
_RETURN_S = 30.0
# A node that has lost its leader looks for the next one every second.
_FOLLOW_S = 5.0


@dataclass(frozen=True)
class Limits:
    """How many nodes a run may have.

    Attributes:
        min_nodes: Fewer do not train.
        max_nodes: More are spares.
        last_call_s: Seconds that the first attempt waits for further nodes once there are enough.
        grow_interval_s: Seconds from one change to the admission of further nodes.
        samples: Samples of a step; None if the ranks need not share them equally, or nobody knows yet.
        local_ranks: Ranks on each node.
        uneven: Whether some ranks may have fewer samples than others.
        parts: What `samples` counts: samples, or virtual ranks.
        model_ranks: Ranks that compute the same samples together.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float = 0.0
    grow_interval_s: float = 0.0
    samples: int | None = None
    local_ranks: int = 1
    uneven: bool = False
    parts: str = "samples"
    model_ranks: int = 1

    @classmethod
    def of(cls, launch: LaunchConfig, shape: tuple[int, int], samples: StepSamples) -> Limits:
        """Return the limits of a configuration; `shape` is the number of nodes, and of ranks on each."""
        num_nodes, local_ranks = shape
        smallest = min(launch.min_nodes or num_nodes, num_nodes)
        return cls(
            smallest,
            num_nodes,
            launch.last_call_s,
            launch.grow_interval_s,
            samples.number(num_nodes * local_ranks),
            local_ranks,
            uneven=samples.may_be_uneven,
            parts=samples.parts,
            model_ranks=samples.model_ranks,
        )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes

    def check(self) -> None:
        """Check that some number of nodes can share the samples of a step; the UsageError says how many ranks can."""
        if self.samples is not None and self.fitting(self.max_nodes) is None:
            if self.uneven:
                ranks, most = self.max_nodes * self.local_ranks, self.samples * self.model_ranks
                raise UsageError(
                    f"a step of this run has {self.samples} {self.parts}, which {ranks} ranks cannot share; start at "
                    f"most {most} ranks in all (--nproc-per-node, --nnodes)"
                )
            check_shares(self.samples, self.max_nodes * self.local_ranks, model_ranks=self.model_ranks)

    def fitting(self, available: int) -> int | None:
        """Return the largest number of so many nodes that can share a step's samples; None if there is none."""
        for number in range(min(available, self.max_nodes), self.min_nodes - 1, -1):
            sharing, rest = divmod(number * self.local_ranks, self.model_ranks)
            if rest:
                continue
            if self.samples is None or self.samples % sharing == 0 or (self.uneven and self.samples > sharing):
                return number
        return None

    def missing(self, ready: AbstractSet[int]) -> list[int]:
        """Return the lowest node ranks that are absent, as many as there are nodes missing."""
        # Spares may have ranks above `max_nodes`.
        absent = sorted(set(range(self.max_nodes)) - ready)
        return absent[: max(self.max_nodes - len(ready), 0)]

    def chosen(self, available: AbstractSet[int], members: AbstractSet[int], leader: int) -> frozenset[int] | None:
        """Choose the nodes that train; None if there are not enough.

        The leader always takes part. Members of the newest attempt, which hold its state, come before others, and then
        the lowest node ranks.
        """
        number = self.fitting(len(available))
        if number is None:
            return None
        ordered = sorted(available, key=lambda node: (node != leader, node not in members, node))
        return frozenset(ordered[:number])


@dataclass(frozen=True)
class Seen:
    """What the leader knows of the nodes.

    Attributes:
        ready: Node ranks of those whose processes are up, the leader's included.
        coming: Those that are connected, while their processes start or end.
        members: Those of the newest attempt; empty before the first one of this session.
        leader: Node rank of the leader.
        expected: Those that followed the leader before this one; they look for the new one.
    """

    ready: frozenset[int]
    coming: frozenset[int] = frozenset()
    members: frozenset[int] = frozenset()
    leader: int = 0
    expected: frozenset[int] = frozenset()


def admit(limits: Limits, seen: Seen, *, enough_s: float = 0.0) -> frozenset[int] | None:
    """Decide whether an attempt begins now, and on which nodes.

    A run that has lost nodes continues at once on those that are left; one that has lost its leader, when they have
    found the next. Only its first attempt waits for more than it needs, as torchrun's rendezvous does with its last
    call.

    Returns:
        The node ranks; None to wait, where enough nodes have been ready for `enough_s` seconds.
    """
    chosen = limits.chosen(seen.ready, seen.members, seen.leader)
    if chosen is None or len(chosen) == limits.fitting(limits.max_nodes):
        return chosen
    if not seen.members:
        if seen.expected and (seen.expected <= seen.ready or enough_s >= _FOLLOW_S):
            return chosen
        return chosen if enough_s >= limits.last_call_s else None
    # These have the newest snapshot and are about to be ready.
    returning = seen.coming & seen.members
    better = limits.fitting(len(seen.ready | returning))
    if better is not None and better > len(chosen) and enough_s < _RETURN_S:
        return None
    return chosen


def change(
    limits: Limits, seen: Seen, *, leaving: AbstractSet[int] = frozenset(), since_change_s: float = 0.0
) -> frozenset[int] | None:
    """Decide whether a running attempt ends at a step boundary, so that the next one has other nodes.

    Those that are `leaving` were asked to stop, and have said so. Since the nodes changed last, `since_change_s` have
    passed.

    Returns:
        The node ranks of the next attempt; None to continue this one.
    """
    left = limits.chosen((seen.ready | seen.members) - leaving, seen.members, seen.leader)
    if seen.members & leaving:
        return left
    if left is None or len(left) <= len(seen.members) or since_change_s < limits.grow_interval_s:
        return None
    return left


class StepSamples:
    """Knows how many samples a step has: as a checkpoint says, as ranks have reported, or as configured, in this order.

    Args:
        config: The resolved configuration.
        known: What the newest checkpoint says; None if there is none, or if a script may count in its own way.
        batch: How ranks have divided a step before.
        has_script: Whether a user's script trains, whose batches only it knows.

    Attributes:
        model_ranks: Ranks that compute the same samples together (tensor parallelism), as far as they have said so.
    """

    def __init__(self, config: Config, known: int | None, batch: BatchDivision, *, has_script: bool) -> None:
        self._config, self._has_script, self._known = config, has_script, known
        # Samples that any number of ranks can share; None if they must divide them, or nobody has said so.
        self._shared = batch.samples
        # Of the bundled job it is the configuration that says so, and it may have changed.
        self.model_ranks = batch.model_ranks if has_script else config.model_ranks

    def learn(self, batch: BatchShape | None, ranks: int) -> bool:
        """Take over how an attempt of so many ranks divides a step, if they have said so; return whether it is news."""
        if batch is None:
            return False
        before = self._known, self._shared, self.model_ranks
        self._shared, self.model_ranks = batch.samples, batch.model_ranks
        if self._known is None:
            self._known = batch.samples or batch.micro_batch * batch.accumulation * (ranks // batch.model_ranks)
        return before != (self._known, self._shared, self.model_ranks)

    def number(self, planned_ranks: int) -> int | None:
        """Return the samples of a step, or its virtual ranks, where so many ranks are planned; None if nobody knows."""
        if self._config.elastic.mode == "exact":
            return self._config.elastic.virtual_ranks or self._shared or planned_ranks
        if self._known is not None or self._has_script:
            return self._known
        trainer = self._config.trainer
        # The defaults of Hugging Face's TrainingArguments.
        batch = trainer.get("per_device_train_batch_size", 8), trainer.get("gradient_accumulation_steps", 1)
        return int(batch[0]) * int(batch[1]) * (planned_ranks // self.model_ranks)

    @property
    def parts(self) -> str:
        """What a step has so many of."""
        return "virtual ranks" if self._config.elastic.mode == "exact" else "samples"

    @property
    def may_be_uneven(self) -> bool:
        """Whether the ranks can share a step's samples also where they do not divide them."""
        return self._shared is not None or self._config.elastic.mode == "exact"


def samples_per_step(catalog: Catalog) -> int | None:
    """Return the samples of a step, as the newest checkpoint counts them; None if there is none."""
    newest = next((entry.manifest for entry in catalog.scan() if entry.manifest is not None), None)
    return newest.samples_consumed // newest.step if newest is not None and newest.step > 0 else None


def counts_samples(job: JobIdentity, record: RestartState) -> bool:
    """Return whether a checkpoint's number of samples counts those of all ranks.

    A script may count in its own way, unless it has reported how its batches are divided.
    """
    return job.what["job"] == "the configured job" or record.batch.micro_batch is not None


def check_shares(samples: int, *world_sizes: int, model_ranks: int = 1) -> None:
    """Check that the ranks can share the samples of a step equally, as the run's first ones did.

    The run may train with any of these numbers of ranks; one that can is enough. `model_ranks` of them compute the same
    samples together.

    Raises:
        UsageError: None can; the text says which numbers can.
    """
    if any(size % model_ranks == 0 and samples % (size // model_ranks) == 0 for size in world_sizes):
        return
    fitting = ", ".join(str(number * model_ranks) for number in range(1, samples + 1) if samples % number == 0)
    raise UsageError(
        f"a step of this run has {samples} samples, which {world_sizes[-1]} ranks cannot share equally; start "
        f"{fitting} ranks in all (--nproc-per-node, --nnodes), or begin again in another --output-dir"
    )
