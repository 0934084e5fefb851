"""Pages of one file each, which load nothing: their style, their script, and what a browser may do with them."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from runner.system.text import duration
from runner.ui.drawing import LineChart, RowChart, draw

_FOLDER = Path(__file__).parent


def render(template: str, live_s: float | None = None, **values: Any) -> str:
    """Return a page.

    Args:
        template: A template in this folder.
        live_s: Seconds after which the page asks its server for newer figures; None for a file.
        values: What the template shows.
    """
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # What a text from a journal might smuggle in runs nothing, and sends nothing.
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'"
    policy += "; form-action 'none'" + ("; connect-src 'self'" if live_s is not None else "")
    return _templates().get_template(template).render(policy=policy, script=Markup(script), live_s=live_s, **values)


def chart(title: str, figure: LineChart | RowChart) -> str:
    """Return a page with one chart."""
    return render("chart.html", title=title, drawn=draw(figure, title))


@cache
def _script() -> str:
    return _FOLDER.joinpath("page.js").read_text(encoding="utf-8")


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "percent": lambda share: f"{100 * share:.1f} %", "draw": draw}
    return environment
