"""Check the links of the repository's Markdown files, and those of the built site.

    python scripts/check_links.py [SITE]

Links to other hosts are not followed. Without SITE only the Markdown files are read.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FENCED = re.compile(r"^\s*(```+|~~~+).*?^\s*\1\s*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^()\s<>]+(?:\([^()\s]*\))?)>?(?:\s+\"[^\"]*\")?\s*\)")
_HTML_LINK = re.compile(r"<(?:a|img)\s[^>]*?(?:href|src)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
# Tags whose address a browser loads by itself.
_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src"}
_NOT_LOADED = ("canonical", "next", "prev", "edit", "alternate")


def markdown_files(root: Path) -> list[Path]:
    found = [*root.glob("*.md")]
    for folder in ("docs", "deploy", "tests", "scripts", ".github"):
        found += (root / folder).rglob("*.md")
    return sorted(found)


def markdown_problems(root: Path) -> Iterator[str]:
    """Yield what is wrong with relative links: a missing file, a missing heading, a path outside the repository."""
    for page in markdown_files(root):
        text = _COMMENT.sub("", _FENCED.sub("", page.read_text(encoding="utf-8")))
        without_code = _CODE.sub("`code`", text)
        for link in [*_LINK.findall(without_code), *_HTML_LINK.findall(without_code)]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            where = f"{page.relative_to(root)}: {link}"
            if not target.is_relative_to(root) or not target.exists():
                yield f"{where}: there is no such file"
            elif parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target):
                yield f"{where}: there is no such heading"


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


class _Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        address = attributes.get(_LOADED.get(tag, ""))
        if address and attributes.get("rel") not in _NOT_LOADED:
            self.loaded.append(address)


def site_problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with a built site: missing pages, anchors and files; files loaded from another host."""
    # The error page is served for any address, so its links are absolute.
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    if not pages:
        yield f"{site}: there are no pages"
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            where = f"{path.relative_to(site)}: {link}"
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{where}: is loaded from another host"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_relative_to(site) or not target.exists():
                yield f"{where}: there is no such page"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{where}: there is no such anchor"


def main() -> None:
    problems = list(markdown_problems(Path(__file__).resolve().parents[1]))
    for folder in sys.argv[1:]:
        problems += site_problems(Path(folder).resolve())
    for problem in problems:
        print(f"check_links: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
