"""Messages about the run that are shown once."""

from __future__ import annotations

from runner.config.schema import Config
from runner.recovery.failure import Failure
from runner.recovery.kinds import Action
from runner.ui.progress import ProgressDisplay


class Notices:
    """Shows each message at most once per session."""

    def __init__(self, config: Config, display: ProgressDisplay) -> None:
        self._config, self._display = config, display
        self._learning_rate_shown = self._unsaved_shown = False

    def show_learning_rate(self, world_size: int) -> None:
        """Show the learning rate that is used: it is not the number in the configuration.

        Args:
            world_size: Ranks on all nodes.
        """
        rate, groups = self._config.trainer.get("learning_rate"), self._config.sharing(world_size)
        if groups == 1 or not self._config.scale_learning_rate or self._learning_rate_shown or rate is None:
            return
        self._learning_rate_shown = True
        others = "groups of ranks" if self._config.model_ranks > 1 else "virtual ranks"
        self._display.message(
            f"learning rate {rate:g} x {groups} {'ranks' if groups == world_size else others} = "
            f"{rate * groups:g} (scale_learning_rate=false turns this off)"
        )

    def show_unsaved(self, failure: Failure) -> None:
        """Warn that the script saves nothing, unless it may not have come far enough to save.

        Args:
            failure: How an attempt ended in which no rank used a checkpoint manager.
        """
        rule = failure.kind.rule
        if not rule.is_failure or rule.action in (Action.GIVE_UP, Action.RETRY) or self._unsaved_shown:
            return
        self._unsaved_shown = True
        self._display.message(
            "the script has used neither resilient() nor a CheckpointManager: nothing is saved, and each attempt "
            "starts from the beginning"
        )
