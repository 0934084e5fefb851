from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace

import pytest


def test_the_navigation_is_the_folder_tree_in_the_given_order(site_hooks: ModuleType) -> None:
    pages = [
        "design/decisions/0001-a.md",
        "design/decisions/README.md",
        "guides/b.md",
        "guides/a-new-one.md",
        "index.md",
    ]
    order = ["index.md", "guides", "guides/b.md", "guides/missing.md", "design"]
    assert site_hooks.navigation(pages, order) == [
        "index.md",
        {"Guides": ["guides/b.md", "guides/a-new-one.md"]},
        {"Design": [{"Decisions": ["design/decisions/README.md", "design/decisions/0001-a.md"]}]},
    ]


@pytest.mark.parametrize(
    ("text", "repository", "expected"),
    [
        ("[a](other.md)", None, "[a](other.md)"),
        ("[a](../reference/cli.md#x)", None, "[a](../reference/cli.md#x)"),
        ("see [a](../../README.md#use).", None, "see a."),
        ("[a](../../README.md#use)", "https://host/o/r/", "[a](https://host/o/r/blob/main/README.md#use)"),
        ("[a](../../runner)", "https://host/o/r", "[a](https://host/o/r/tree/main/runner)"),
        ("![a](../../README.md)", None, "![a](../../README.md)"),
        ("```\n[a](../../README.md)\n```\n[b](../../README.md)", None, "```\n[a](../../README.md)\n```\nb"),
    ],
)
def test_links_to_files_outside_the_site(
    site_hooks: ModuleType, text: str, repository: str | None, expected: str
) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/page.md"))
    config = SimpleNamespace(repo_url=repository)
    assert site_hooks.on_page_markdown(text, page=page, config=config, files=None) == expected


def test_bold_titles_between_marks_become_tabs(site_hooks: ModuleType) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    first = "Text with **bold** words.\n\n```bash\nrun [a](../README.md)\n```"
    tabs = f"**A loop**\n\n{first}\n\n**A command**\n\n[b](../README.md)\n\n"
    made = site_hooks.on_page_markdown(
        f"**Before**\n\n<!-- tabs -->\n{tabs}<!-- end of tabs -->\n\n**After**",
        page=page,
        config=SimpleNamespace(repo_url=None),
        files=None,
    )
    indented = "    Text with **bold** words.\n\n    ```bash\n    run [a](../README.md)\n    ```"
    assert made == f'**Before**\n\n=== "A loop"\n\n{indented}\n\n=== "A command"\n\n    b\n\n**After**'


def test_a_missing_target_is_a_warning(site_hooks: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/page.md"))
    with caplog.at_level(logging.WARNING):
        site_hooks.on_page_markdown("[a](../../nowhere)", page=page, config=SimpleNamespace(repo_url=None), files=None)
    assert "guides/page.md: the link target ../../nowhere does not exist" in caplog.text
