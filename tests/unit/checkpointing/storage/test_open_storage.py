"""Which back end a location names."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from checkpointing.storage import BACK_ENDS, BackEnd, LocalStorage, Storage, open_storage


@pytest.mark.parametrize("location", ["{}/run", "file://{}/run"])
def test_a_path_and_a_file_url_are_a_directory(location: str, tmp_path: Path) -> None:
    assert open_storage(location.format(tmp_path)).root == tmp_path / "run"


def test_what_is_not_a_directory_has_no_root() -> None:
    storage = open_storage("memory://bucket/run")
    assert (storage.root, storage.location, storage.free_bytes()) == (None, "memory://bucket/run", None)


@pytest.mark.parametrize(
    ("location", "message"),
    [("file://relative/run", "three slashes"), ("no://host/x", "scheme 'no' is not known"), ("s3://", "no bucket")],
)
def test_what_names_nothing_is_refused(location: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_storage(location)


def test_a_back_end_is_a_module_and_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("tape")

    def open_location(location: str) -> Storage:
        return LocalStorage(tmp_path / location.removeprefix("tape://"))

    monkeypatch.setattr(module, "open_location", open_location, raising=False)
    monkeypatch.setitem(sys.modules, "tape", module)
    monkeypatch.setitem(BACK_ENDS, "tape", BackEnd("tape"))
    assert open_storage("tape://1").location == str(tmp_path / "1")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACK_ENDS, "tape", BackEnd("nosuchpackage", extra="s3"))
    with pytest.raises(ValueError, match=r"nosuchpackage is not installed: pip install 'resilient-training\[s3\]'"):
        open_storage("tape://1")
