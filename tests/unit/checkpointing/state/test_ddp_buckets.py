"""Which layout goes to which module, and what is said where one cannot be put back."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small_checkpoint import point

from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.layout import BUCKETS_NAME
from checkpointing.state import ddp_buckets
from checkpointing.state.ddp_buckets import BucketLayout, DdpBuckets, missing_names, parsed, written

SMALL, LARGE = (2, 80, 1000), (3, 160, 1000)
LAYOUTS = [BucketLayout(SMALL, ((1,), (0,))), BucketLayout(LARGE), BucketLayout(SMALL, ((0, 1),))]


class Module:
    """A DDP module: what is imposed on it, and what it answers."""

    static_graph = find_unused_parameters = False

    def __init__(self, kind: tuple[int, ...], final: ddp_buckets.Buckets | None = None) -> None:
        self.kind, self.final = kind, final


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    found: list[Module] = []
    monkeypatch.setattr(ddp_buckets, "ddp_modules", lambda _: found)
    monkeypatch.setattr(ddp_buckets, "traits_of", lambda module: module.kind)
    monkeypatch.setattr(ddp_buckets, "current", lambda module: module.final)
    monkeypatch.setattr(ddp_buckets, "settle", lambda module: module.final)

    def impose(module: Module, buckets: ddp_buckets.Buckets) -> bool:
        had_none, module.final = module.final is None, module.final or buckets
        return had_none

    monkeypatch.setattr(ddp_buckets, "impose", impose)
    return found


def restored(layouts: list[BucketLayout]) -> DdpBuckets:
    buckets = DdpBuckets(is_first=True)
    buckets.restore(point(BUCKETS_NAME, written(layouts)))
    return buckets


def test_layouts_survive_the_file() -> None:
    assert parsed(point(BUCKETS_NAME, written(LAYOUTS)).json(BUCKETS_NAME)) == LAYOUTS


def test_each_module_gets_its_own_in_the_order_in_which_they_were_made(modules: list[Module]) -> None:
    modules += [Module(SMALL), Module(LARGE), Module(SMALL)]
    buckets = restored(LAYOUTS)
    assert [module.final for module in modules] == [LAYOUTS[0].buckets, None, LAYOUTS[2].buckets]
    assert parsed(point(BUCKETS_NAME, buckets.files()[BUCKETS_NAME]).json(BUCKETS_NAME)) == LAYOUTS


def test_a_training_without_ddp_writes_nothing(modules: list[Module]) -> None:
    assert DdpBuckets(is_first=True).files() == {}


def test_another_kind_is_left_alone(modules: list[Module]) -> None:
    modules.append(Module((2, 80, 2000)))
    restored(LAYOUTS)
    assert modules[0].final is None


def test_a_module_that_has_trained_before_is_named(modules: list[Module], caplog: pytest.LogCaptureFixture) -> None:
    modules += [Module(SMALL, ((0,), (1,)))]
    with caplog.at_level(logging.WARNING):
        restored(LAYOUTS[:1])
    assert "had computed gradients before" in caplog.text and "last bits differ" in caplog.text


def test_one_that_has_the_same_layout_already_is_not(modules: list[Module], caplog: pytest.LogCaptureFixture) -> None:
    modules += [Module(SMALL, LAYOUTS[0].buckets)]
    with caplog.at_level(logging.WARNING):
        restored(LAYOUTS[:1])
    assert not caplog.text


def test_what_was_put_back_is_compared_after_the_first_step(
    modules: list[Module], caplog: pytest.LogCaptureFixture
) -> None:
    modules.append(Module(SMALL))
    buckets = restored(LAYOUTS[:1])
    modules[0].final = ((0, 1),)
    with caplog.at_level(logging.WARNING):
        buckets.end_of_step()
    assert "did not keep the order" in caplog.text
    # What is saved is what holds.
    assert b"[[0, 1]]" in buckets.files()[BUCKETS_NAME]


def test_an_older_checkpoint_is_named_where_it_matters(modules: list[Module], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        DdpBuckets(is_first=True).restore(point("x", b""))
        assert not caplog.text
        modules.append(Module(SMALL))
        DdpBuckets(is_first=True).restore(point("x", b""))
    assert "older version" in caplog.text


def test_a_torch_without_the_names_is_named_once(
    modules: list[Module], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp_buckets, "missing_names", lambda: ("Reducer._rebuild_buckets",))
    modules.append(Module(SMALL))
    with caplog.at_level(logging.WARNING):
        buckets = restored(LAYOUTS[:1])
        buckets.end_of_step()
    assert modules[0].final is None
    assert caplog.text.count("Reducer._rebuild_buckets") == 1


def test_this_torch_has_them() -> None:
    assert missing_names() == ()


@pytest.mark.parametrize(
    "data",
    [b"[]", b"{}", b'{"modules": 3}', b'{"modules": [{"kind": [1]}]}', b'{"modules": [{"kind": 1, "buckets": 2}]}'],
)
def test_a_file_that_is_none_is_refused_by_name(modules: list[Module], data: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match=BUCKETS_NAME):
        DdpBuckets(is_first=True).restore(point(BUCKETS_NAME, data))


def test_numbers_of_other_parameters_are_not_imposed(modules: list[Module], caplog: pytest.LogCaptureFixture) -> None:
    modules.append(Module(SMALL))
    with caplog.at_level(logging.WARNING):
        restored([BucketLayout(SMALL, ((0, 2),))])
    assert modules[0].final is None and "of other parameters" in caplog.text


def test_parameters_of_models_and_of_optimizers_count() -> None:
    held: Any = object()
    optimizer = SimpleNamespace(param_groups=[{"params": [held]}])
    assert ddp_buckets._trained_parameters([None, optimizer, object()]) == {id(held)}
