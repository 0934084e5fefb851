"""The nodes of a simulated run: those that train, spares, and those whose replacement is on its way."""

from __future__ import annotations

import math

from runner.plan.simulate.scenario import Scenario


class Nodes:
    """Which nodes a run has, as time passes and nodes are lost.

    Attributes:
        active: Nodes that train, or would.
        spares: Nodes that are ready to take the place of a lost one.
    """

    def __init__(self, scenario: Scenario) -> None:
        """Begin with all nodes and all spares.

        Args:
            scenario: The run.
        """
        self._it = scenario
        self.active, self.spares = int(scenario.nodes), int(scenario.spares)
        # Seconds until each replacement is there, the next one first.
        self._coming: list[float] = []
        self._since_change_s = math.inf

    @property
    def share(self) -> float:
        """Active nodes, as a share of those that the run may have."""
        return self.active / self._it.nodes

    @property
    def growth_in(self) -> float:
        """Seconds until a node can be admitted; inf if none is missing."""
        if self.active == self._it.nodes or not (self.spares or self._coming):
            return math.inf
        there_in = 0.0 if self.spares else self._coming[0]
        return max(there_in, self._it.grow_interval_s - self._since_change_s, 0.0)

    def elapse(self, seconds: float) -> None:
        """Let time pass; replacements that arrive are spares until they are admitted."""
        self._since_change_s += seconds
        self._coming = [left - seconds for left in self._coming]
        while self._coming and self._coming[0] <= 1e-9:
            self._coming.pop(0)
            self.spares += 1

    def lose(self) -> float:
        """Lose a node, which is replaced after `node_wait_s`.

        Returns:
            Seconds that the run waits, until it has as many nodes as it needs.
        """
        # All take as long, so the newest one comes last.
        self._coming.append(self._it.node_wait_s)
        self.active -= 1
        self._admit()
        waited_s = 0.0
        while self.active < self._it.min_nodes:
            step_s = self._coming[0]
            waited_s += step_s
            self.elapse(step_s)
            self._admit()
        self._since_change_s = 0.0
        return waited_s

    def grow(self) -> None:
        """Admit the nodes that have come."""
        self._admit()
        self._since_change_s = 0.0

    def _admit(self) -> None:
        came = min(self.spares, int(self._it.nodes) - self.active)
        self.active, self.spares = self.active + came, self.spares - came
