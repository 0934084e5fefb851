"""Which ranks are slow, what is timed, and when ranks compare."""

from __future__ import annotations

import copy
import dataclasses
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from checkpointing.agent.events import SlowRanks
from checkpointing.manager.slow_ranks import WINDOW_STEPS, SpeedComparison, StepTimer, slow_ranks
from checkpointing.process import device
from checkpointing.process.ranks import Ranks


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([], {}),
        ([0.1], {}),
        ([0.0, 0.0], {}),
        ([0.1, 0.1, 0.1, 0.13], {3: 1.3}),
        ([0.1, 0.1, 0.1, 0.129], {}),
        # Of two, and of two groups of equal size, the faster one is the measure.
        ([0.2, 0.1], {0: 2.0}),
        ([0.1, 0.1, 0.2, 0.2], {2: 2.0, 3: 2.0}),
        # Two slow ones among many.
        ([0.1, 0.3, 0.1, 0.1, 0.15], {1: 3.0, 4: 1.5}),
        # A rank that was not timed, and differences that nobody would notice.
        ([0.0, 0.1, 0.2], {2: 2.0}),
        ([0.001, 0.004], {}),
        # A fast rank makes no other one slow.
        ([0.01, 0.1, 0.1, 0.1], {}),
    ],
)
def test_slow_is_what_the_median_rank_is_not(seconds: list[float], slow: dict[int, float]) -> None:
    assert slow_ranks(seconds) == slow


class Layer(torch.nn.Module):
    """Takes as many seconds as its input says, by a clock that only it moves."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.clock = clock

    def forward(self, seconds: float) -> torch.Tensor:
        if seconds < 0:
            raise RuntimeError("forward failed")
        self.clock[0] += seconds
        return self.weight * seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_step_has_the_seconds_of_its_passes_in_training(clock: list[float]) -> None:
    model = Layer(clock)
    timer = StepTimer(model)
    for seconds in (0.1, 0.2, 9.0):
        model(seconds)
        clock[0] += 50.0  # the backward pass, in which a rank waits for others
        model(seconds)
        timer.end_step()
        model.eval()
        model(1000.0)
        model.train()
        with torch.no_grad():
            model(1000.0)
    # The median: one slow step in 50 says nothing.
    assert timer.take().forward == pytest.approx(0.4)
    assert timer.take() == (0.0, 0.0)


def test_the_time_between_two_steps_ends_with_the_draw_or_the_first_pass(clock: list[float]) -> None:
    model = Layer(clock)
    timer = StepTimer(model)
    for draws in (False, True):
        for _ in range(3):
            clock[0] += 0.5  # callbacks, the data
            if draws:
                timer.drawn()
                clock[0] += 50.0  # a collective that waits for the other ranks
            for _ in range(2):
                model(0.25)
                clock[0] += 7.0  # the backward pass, and another draw
                if draws:
                    timer.drawn()
            timer.end_step()
        # Before the first step are imports and compilations, whose time is not counted.
        assert timer.take() == (0.5, 1.0)


def test_a_pass_that_fails_does_not_count(clock: list[float]) -> None:
    model = Layer(clock)
    timer = StepTimer(model)
    with pytest.raises(RuntimeError, match="forward failed"):
        model(-1.0)
    model(0.25)
    timer.end_step()
    assert timer.take().forward == 0.25


def test_nothing_is_timed_after_the_end(clock: list[float]) -> None:
    model = Layer(clock)
    timer = StepTimer(model)
    timer.close()
    model(0.25)
    timer.end_step()
    assert timer.take() == (0.0, 0.0) and not model._forward_hooks and not model._forward_pre_hooks


def test_a_model_can_be_copied_and_saved_with_its_timer() -> None:
    model = torch.nn.Linear(2, 2)
    timer = StepTimer(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        twin(torch.ones(1, 2))
    timer.end_step()
    # Only the original is timed.
    assert timer.take() == (0.0, 0.0)


def test_a_compiled_graph_does_not_contain_the_timer() -> None:
    model = torch.nn.Linear(2, 2)
    StepTimer(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(torch.ones(1, 2)).sum().backward()
    assert len(graphs) == 1


def test_what_a_cuda_graph_records_is_not_timed(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layer(clock)
    timer = StepTimer(model)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        model(0.25)
    timer.end_step()
    assert timer.take().forward == 0.25


class Marks:
    """A device whose clock stands still until a mark is passed."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.now, self.passed = 0.0, True

    def mark(self) -> Any:
        device_time, passed = self.now, self.passed

        class Mark:
            at = device_time

            def seconds_since(self, earlier: Any) -> float | None:
                return self.at - earlier.at if passed else None

        self.now += 0.5
        return Mark()


def test_a_device_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: Any = Marks()
    monkeypatch.setattr(device, "of", lambda tensors: marks)
    model = torch.nn.Linear(2, 2)
    timer = StepTimer(model)
    for _ in range(3):
        model(torch.ones(1, 2))
        timer.end_step()
    # Each mark is half a second after the one before.
    assert timer.take() == (0.5, 1.0)
    # Where the device has no clock, or has not come so far, nothing is known; of one step never.
    marks.passed = False
    for number in (1, 3):
        for _ in range(number):
            model(torch.ones(1, 2))
            timer.end_step()
        assert timer.take() == (0.0, 0.0)


class Everyone(Ranks):
    """Ranks whose other members answer what the test says."""

    others: list[list[float]]
    sent: list[list[float]]

    def gather_later(self, values: Sequence[float]) -> Callable[[], list[list[float]]]:
        self.sent.append(list(values))
        return lambda: [list(values), *self.others]


class Compared:
    def __init__(self, clock: list[float], rank: int = 0) -> None:
        self.ranks = Everyone(rank=rank, world_size=3)
        object.__setattr__(self.ranks, "sent", [])
        self.model = Layer(clock)
        self.reports: list[SlowRanks] = []
        self.comparison = SpeedComparison(self.ranks, StepTimer(self.model), node_rank=7, report=self.reports.append)

    def steps(self, number: int, *others: list[float]) -> None:
        object.__setattr__(self.ranks, "others", list(others))
        for _ in range(number):
            self.model(0.125)
            self.comparison.end_of_step()


def test_slow_ranks_are_reported_when_they_change(clock: list[float]) -> None:
    compared = Compared(clock)
    slow, sound = [0.25, 0.25, 9], [0.125, 0.125, 8]
    compared.steps(WINDOW_STEPS, sound, slow)
    assert compared.ranks.sent == [[0.125, 0.125, 7]] and compared.reports == []
    compared.steps(1, sound, slow)
    event = SlowRanks(ranks=[2], ratios=[2.0], nodes=[9])
    assert compared.reports == [event]
    # Nothing new, or only another ratio.
    compared.steps(WINDOW_STEPS, sound, [0.5, 0.5, 9])
    assert compared.reports == [event]
    compared.steps(WINDOW_STEPS, slow, sound)
    assert compared.reports[1:] == [SlowRanks(ranks=[1], ratios=[2.0], nodes=[9])]
    # One that computes as fast as the others, and comes late.
    compared.steps(WINDOW_STEPS, slow, [0.125, 0.5, 9])
    assert compared.reports.pop() == SlowRanks(ranks=[1, 2], ratios=[2.0, 2.0], nodes=[9, 9], between_steps=[2])
    # Where most are slow, that is the measure.
    compared.steps(WINDOW_STEPS, slow, slow)
    assert compared.reports[2:] == [SlowRanks(ranks=[], ratios=[], nodes=[])]


def test_only_rank_0_reports_and_the_end_leaves_nothing_in_flight(clock: list[float]) -> None:
    for rank, count in ((1, 0), (0, 1)):
        compared = Compared(clock, rank)
        compared.steps(WINDOW_STEPS, [0.125, 0.125, 8], [0.25, 0.25, 9])
        compared.comparison.close()
        compared.comparison.close()
        assert len(compared.reports) == count
        assert not compared.model._forward_hooks


def test_ranks_alone_need_no_comparison() -> None:
    assert Ranks().gather_later([0.5, 1])() == [[0.5, 1.0]]
    assert dataclasses.replace(Ranks(), rank=0).world_size == 1
