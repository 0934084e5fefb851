"""How many samples a step of the run has, which any number of ranks must be able to share equally."""

from __future__ import annotations

from checkpointing.manifest import Manifest
from runner.config.schema import Config
from runner.recovery.restart_state import RestartState
from runner.supervisor.identity import JobIdentity
from runner.supervisor.preflight import counts_samples


class StepSamples:
    """Knows the number from a checkpoint, from what ranks have reported, or from the configuration, in this order."""

    def __init__(self, config: Config, newest: Manifest | None, *, counts: bool, has_script: bool) -> None:
        """Look at the newest checkpoint.

        Args:
            config: The resolved configuration.
            newest: Manifest of the newest checkpoint; None if there is none.
            counts: Whether its number of samples counts those of all ranks.
            has_script: Whether a user's script trains, whose batches only it knows.
        """
        self._config, self._has_script = config, has_script
        self._known = newest.samples_consumed // newest.step if counts and newest is not None and newest.step else None

    @classmethod
    def of(cls, config: Config, identity: JobIdentity | None, state: RestartState, *, has_script: bool) -> StepSamples:
        """Look for the newest checkpoint of a run.

        Args:
            config: The resolved configuration.
            identity: Of the job; None if it is not known.
            state: The restart state.
            has_script: See above.
        """
        newest = next((entry.manifest for entry in config.tiers.catalog.scan() if entry.manifest), None)
        counts = identity is None or counts_samples(identity, state)
        return cls(config, newest, counts=counts, has_script=has_script)

    def learn(self, batch: tuple[int, int] | None, ranks: int) -> None:
        """Take over what the ranks of an attempt have reported.

        Args:
            batch: Samples of a rank's micro-batch, and micro-batches of a step; None if they have not.
            ranks: Ranks of the attempt.
        """
        if batch is not None and self._known is None:
            self._known = batch[0] * batch[1] * ranks

    def number(self, planned_ranks: int) -> int | None:
        """Return the samples of a step; None if nobody knows.

        Args:
            planned_ranks: Ranks that the configured batch is meant for.
        """
        if self._known is not None or self._has_script:
            return self._known
        trainer = self._config.trainer
        # The defaults of Hugging Face's TrainingArguments.
        batch = trainer.get("per_device_train_batch_size", 8), trainer.get("gradient_accumulation_steps", 1)
        return int(batch[0]) * int(batch[1]) * planned_ranks
