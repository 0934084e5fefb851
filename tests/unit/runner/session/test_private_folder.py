"""The folder of a session's sockets, in a temporary folder that all users of the machine share."""

from __future__ import annotations

from pathlib import Path

from unit.runner.session.test_session import System, opened, system

__all__ = ["system"]


def test_nobody_else_reaches_the_sockets(system: System, tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        assert one.runtime.stat().st_mode & 0o777 == 0o700


def test_a_link_that_somebody_has_planted_leads_nowhere(system: System, tmp_path: Path) -> None:
    """What an earlier session has left there is removed by its name, which is known."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("years of work")
    with opened(tmp_path) as one:
        name = one.runtime.name[: len("runner-12345678")]
    one.runtime.with_name(f"{name}planted").symlink_to(tmp_path / "home")
    (one.runtime.with_name(f"{name}folder")).mkdir()
    (one.runtime.with_name(f"{name}folder") / "inner").symlink_to(tmp_path / "home")
    with opened(tmp_path) as one:
        assert not one.runtime.is_symlink() and list(one.runtime.iterdir()) == []
    assert (tmp_path / "home" / "thesis").read_text() == "years of work"
