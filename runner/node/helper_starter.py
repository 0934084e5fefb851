"""Starts the helper processes of a node, with the options that follow from the configuration."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from checkpointing.agent.options import AgentOptions
from runner.config.schema import Config
from runner.errors import LaunchDelayed
from runner.journal.run_directory import RunDirectory
from runner.launcher.launch_request import launcher_environment
from runner.launcher.script_imports import modules_to_preload
from runner.node.helper_processes import AgentHelper, LauncherHelper
from runner.system import processes


class HelperStarter:
    """Starts checkpoint agents and launchers, each with a temporary folder of its own."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        run_id: str,
        runtime: Path,
        leads: Callable[[], bool],
        script: str | None = None,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            config: The resolved configuration.
            directory: The run's folder.
            run_id: Identity of the run, equal on all nodes.
            runtime: Parent of the temporary folders, which the caller removes.
            leads: Returns whether this node leads the run: its agent commits.
            script: Path of the user's script; None for the bundled job.
        """
        self._config, self._directory, self._run_id, self._runtime = config, directory, run_id, runtime
        self._leads, self._script = leads, script

    def start_agent(self, cancelled: Callable[[], bool]) -> AgentHelper:
        """Start a checkpoint agent.

        Args:
            cancelled: Called while the agent starts; the start is given up once it returns True.

        Raises:
            LaunchError: The agent cannot start.
            LaunchDelayed: It was killed, or may start later.
        """
        checkpoint = self._config.checkpoint
        options = AgentOptions(
            location=self._config.checkpoint_location,
            run_id=self._run_id,
            local_tier=checkpoint.local_tier,
            local_retention=checkpoint.local_retention,
            commits=self._leads(),
            memory_limit=checkpoint.memory_limit_bytes,
            # `runner start` has just tried it: what fails now may pass, as a disk that is remounted does.
            patience_s=self._config.launch.rendezvous_timeout_s,
        )
        return AgentHelper(options, directory=self._folder(), cancelled=cancelled)

    def start_launcher(self) -> LauncherHelper:
        """Start a launcher."""
        # Processes of a node are found by the identity of its own folder, also if the run's identity is the leader's.
        mark = processes.mark(self._directory.run_id(), self._config.launch.node_rank)
        environment = launcher_environment(self._config, mark, modules_to_preload(self._script), os.environ)
        return LauncherHelper(environment, self._directory.logs / "launcher.log", self._folder())

    def _folder(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(dir=self._runtime))
        except OSError as error:
            raise LaunchDelayed(f"no folder for temporary files: {error}") from None
