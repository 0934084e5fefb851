"""MkDocs hooks: the navigation from the folder tree, tabs, and links from pages to files outside docs/."""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

# Its warnings fail a build with --strict.
_logger = logging.getLogger("mkdocs.hooks.site")
_ROOT = Path(__file__).resolve().parents[1]
_FENCED = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<target>\.\./[^()\s#]*)(?P<anchor>#[^()\s]*)?\)")
# What the site shows as tabs. Elsewhere a tab is a paragraph: its title in bold, and what follows.
_TABS = re.compile(r"^<!-- tabs -->\n(?P<tabs>.*?)^<!-- end of tabs -->$", re.MULTILINE | re.DOTALL)
_TAB = re.compile(r"^\*\*(?P<title>[^*\n]+)\*\*$", re.MULTILINE)
_INDEXES = ("index.md", "README.md")


def on_files(files: Any, *, config: Any) -> Any:
    config.nav = navigation([file.src_uri for file in files.documentation_pages()], config.extra["order"])
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Make tabs, and point links that leave docs/ to the repository, where one is configured."""
    # The pattern has two groups, so that every third part is the name of a fence.
    parts = _FENCED.split(markdown)
    for index in range(0, len(parts), 3):
        parts[index] = _LINK.sub(lambda match: _link(match, page.file.src_uri, config.repo_url), parts[index])
    del parts[2::3]
    # Last, as the fences in a tab are indented.
    return _TABS.sub(lambda match: _tabbed(match["tabs"]), "".join(parts))


def navigation(pages: Sequence[str], order: Sequence[str], folder: str = "") -> list[Any]:
    """Return MkDocs' `nav` of a folder: pages by their path, subfolders as {title: nav}.

    Args:
        pages: Paths of all pages, below docs/.
        order: Paths of pages and folders in the wanted order.
        folder: The folder, empty or with a slash at its end.
    """
    names = {page.removeprefix(folder).partition("/")[0] for page in pages if page.startswith(folder)}
    ranks = {path: rank for rank, path in enumerate(order)}

    def key(name: str) -> tuple[bool, int, str]:
        return name not in _INDEXES, ranks.get(folder + name, len(ranks)), name

    entries: list[Any] = []
    for name in sorted(names, key=key):
        if name.endswith(".md"):
            entries.append(folder + name)
        else:
            entries.append({name.replace("-", " ").capitalize(): navigation(pages, order, f"{folder}{name}/")})
    return entries


def _tabbed(text: str) -> str:
    # The text before the first title is empty.
    parts = _TAB.split(text)[1:]
    return "\n\n".join(
        f'=== "{title}"\n\n{textwrap.indent(content.strip(), "    ")}'
        for title, content in zip(parts[::2], parts[1::2], strict=True)
    )


def _link(match: re.Match[str], page: str, repository: str | None) -> str:
    path = os.path.normpath(PurePosixPath("docs", page).parent / match["target"])
    if path.startswith("docs/"):
        return match[0]
    found = _ROOT / path
    if path.startswith("..") or not found.exists():
        _logger.warning("%s: the link target %s does not exist", page, match["target"])
        return match[0]
    if not repository:
        return match["text"]
    kind = "tree" if found.is_dir() else "blob"
    return f"[{match['text']}]({repository.rstrip('/')}/{kind}/main/{path}{match['anchor'] or ''})"
