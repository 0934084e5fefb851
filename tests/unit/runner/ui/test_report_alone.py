"""A report is one file: a browser that opens it asks no other host for anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from helpers.journals import entries
from unit.runner.journal.test_ledger import EVENTS
from unit.runner.ui.test_report import rendered


class Loads(HTMLParser):
    """Collects what a browser would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            is_link = name == "href" and tag == "a"
            if name in ("src", "href", "srcset", "data", "action", "poster") and not is_link:
                self.found.append((tag, value or ""))


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = rendered(entries(EVENTS), "s3://bucket/run", now=200.0)
    loads = Loads()
    loads.feed(page)
    assert [one for one in loads.found if not one[1].startswith(("data:", "#"))] == []
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert "@import" not in style and "url(" not in style
