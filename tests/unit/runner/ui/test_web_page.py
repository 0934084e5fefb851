"""Pages that load nothing, and whose script alone may run."""

from __future__ import annotations

import base64
import hashlib
import html
import re

from runner.ui import web_page
from runner.ui.drawing import Line, LineChart


def a_page() -> str:
    chart = LineChart([Line("a", "red", [("", [(1.0, 2.0), (2.0, 3.0)])])], "x", "y")
    return web_page.chart("title <b>", chart)


def policy_of(text: str) -> str:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    return html.unescape(policy)


def test_a_browser_runs_the_script_of_the_page_and_no_other() -> None:
    text = a_page()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy_of(text)
    assert "default-src 'none'" in policy_of(text) and "unsafe-eval" not in policy_of(text)


def test_only_a_page_that_is_served_asks_for_more() -> None:
    assert "connect-src" not in policy_of(a_page()) and '<html lang="en">' in a_page()
    served = web_page.render("chart.html", 2.5, title="t", drawn="")
    assert "connect-src 'self'" in policy_of(served) and '<html lang="en" data-live="2.5">' in served


def test_a_page_has_its_title_as_text() -> None:
    assert "<h1>title &lt;b&gt;</h1>" in a_page() and "<title>title &lt;b&gt;</title>" in a_page()
