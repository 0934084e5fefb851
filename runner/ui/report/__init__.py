"""`runner report`: one HTML file with the timeline of a run, from its journal alone."""

from runner.ui.report.page import render_page

__all__ = ["render_page"]
