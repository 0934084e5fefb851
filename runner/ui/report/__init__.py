"""`runner report`: one HTML file that tells a run, from its journal alone."""

from runner.ui.report.page import render_page

__all__ = ["render_page"]
