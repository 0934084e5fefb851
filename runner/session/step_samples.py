"""How many samples a step of the run has, and whether its ranks must share them equally."""

from __future__ import annotations

from checkpointing.agent.events import BatchShape
from checkpointing.commit.catalog import Catalog
from checkpointing.format.manifest import Manifest
from runner.config.schema import Config
from runner.recovery.restart_state import RestartState
from runner.session.identity import JobIdentity
from runner.session.preflight import counts_samples


class StepSamples:
    """Knows the number from a checkpoint, from what ranks have reported, or from the configuration, in this order.

    Attributes:
        model_ranks: Ranks that compute the same samples together (tensor parallelism), as far as they have said so.
    """

    def __init__(
        self,
        config: Config,
        newest: Manifest | None,
        *,
        counts: bool,
        has_script: bool,
        shared: int | None = None,
        model_ranks: int = 1,
    ) -> None:
        """Look at the newest checkpoint.

        Args:
            config: The resolved configuration.
            newest: Manifest of the newest checkpoint; None if there is none.
            counts: Whether its number of samples counts those of all ranks.
            has_script: Whether a user's script trains, whose batches only it knows.
            shared: Samples of a step that any number of ranks can share, as ranks have said before; None if they must
                divide it, or nobody has said so.
            model_ranks: Ranks that compute the same samples together, as ranks have said before.
        """
        self._config, self._has_script = config, has_script
        self._known = newest.samples_consumed // newest.step if counts and newest is not None and newest.step else None
        self._shared = shared
        # Of the bundled job it is the configuration that says so, and it may have changed.
        self.model_ranks = model_ranks if has_script else config.model_ranks

    @classmethod
    def of(
        cls, config: Config, identity: JobIdentity | None, state: RestartState, catalog: Catalog, *, has_script: bool
    ) -> StepSamples:
        """Look for the newest checkpoint of a run.

        Args:
            config: The resolved configuration.
            identity: Of the job; None if it is not known.
            state: The restart state.
            catalog: Where to look.
            has_script: See above.
        """
        newest = next((entry.manifest for entry in catalog.scan() if entry.manifest), None)
        counts = identity is None or counts_samples(identity, state)
        batch = state.batch
        return cls(
            config,
            newest,
            counts=counts,
            has_script=has_script,
            shared=batch.samples,
            model_ranks=batch.model_ranks,
        )

    def learn(self, batch: BatchShape | None, ranks: int) -> bool:
        """Take over what the ranks of an attempt have reported.

        Args:
            batch: How they divide a step; None if they have not reported it.
            ranks: Ranks of the attempt.

        Returns:
            Whether that was news.
        """
        if batch is None:
            return False
        before = self._known, self._shared, self.model_ranks
        self._shared, self.model_ranks = batch.samples, batch.model_ranks
        if self._known is None:
            self._known = batch.samples or batch.micro_batch * batch.accumulation * (ranks // batch.model_ranks)
        return before != (self._known, self._shared, self.model_ranks)

    def number(self, planned_ranks: int) -> int | None:
        """Return the samples of a step, or its virtual ranks; None if nobody knows.

        Args:
            planned_ranks: Ranks that the configured batch is meant for.
        """
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
