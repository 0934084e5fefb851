"""Docstrings and signatures of the packages, read from the files without importing them."""

from __future__ import annotations

from functools import cache

import griffe

from scripts.reference import ROOT


@cache
def read_source(name: str) -> griffe.Object | griffe.Alias:
    """Return a package, or the module `package.module`. Each package is parsed once: that takes half a second."""
    package, _, module = name.partition(".")
    if module:
        found: griffe.Object | griffe.Alias = read_source(package)[module]
        return found
    return griffe.load(package, search_paths=[ROOT], allow_inspection=False, docstring_parser="google")
