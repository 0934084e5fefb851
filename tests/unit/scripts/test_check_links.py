from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def test_the_links_of_this_repository(check_links: ModuleType) -> None:
    assert list(check_links.markdown_problems(ROOT)) == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("docs/page.md", None),
        ("docs/page.md#a-heading-with-code", None),
        ("docs/page.md#twice-1", None),
        ("docs", None),
        ("#title", None),
        ("https://example.com/missing.md#x", None),
        ("docs/other.md", "no such file"),
        ("../outside.md", "no such file"),
        ("docs/page.md#twice-2", "no such heading"),
        ("docs/page.md#not-a-heading", "no such heading"),
        ("#nowhere", "no such heading"),
    ],
)
def test_a_link_is_followed(check_links: ModuleType, tmp_path: Path, link: str, problem: str | None) -> None:
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    (tmp_path / "outside.md").write_text("")
    (root / "docs" / "page.md").write_text(
        "# A heading with `code`\n\n## Twice\n\n## Twice\n\n```\n# not a heading\n```\n"
    )
    (root / "README.md").write_text(f"# Title\n\nA [link]({link}).\n")
    problems = list(check_links.markdown_problems(root))
    if problem is None:
        assert problems == []
    else:
        assert len(problems) == 1 and problem in problems[0] and link in problems[0]


def test_code_and_comments_are_no_links(check_links: ModuleType, tmp_path: Path) -> None:
    text = "`[a](b.md)`\n\n```markdown\n[a](b.md)\n```\n\n<!-- [a](b.md) -->\n\n    indented\n"
    (tmp_path / "README.md").write_text(text)
    assert list(check_links.markdown_problems(tmp_path)) == []


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        ('<a href="other.html#there">', None),
        ('<a href="folder/">', None),
        ('<a href="https://example.com/">', None),
        ('<img src="data:image/png;base64,AA==">', None),
        ('<a href="other.html#nowhere">', "no such anchor"),
        ('<a href="missing.html">', "no such page"),
        ('<a href="../../outside.html">', "no such page"),
        ('<script src="https://example.com/x.js"></script>', "loaded from another host"),
        ('<link rel="stylesheet" href="//example.com/x.css">', "loaded from another host"),
        ('<img src="missing.png">', "no such page"),
    ],
)
def test_a_site_is_examined(check_links: ModuleType, tmp_path: Path, element: str, problem: str | None) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text("")
    (tmp_path / "other.html").write_text('<h2 id="there">There</h2>')
    (tmp_path / "index.html").write_text(element)
    problems = list(check_links.site_problems(tmp_path))
    if problem is None:
        assert problems == []
    else:
        assert len(problems) == 1 and problem in problems[0]


def test_an_empty_site_is_a_problem(check_links: ModuleType, tmp_path: Path) -> None:
    assert len(list(check_links.site_problems(tmp_path))) == 1
