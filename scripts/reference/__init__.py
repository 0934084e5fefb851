"""Text of the generated reference pages, one module per page. `scripts/render-reference` writes them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
