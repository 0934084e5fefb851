"""A rank that another launcher started: python -m compatibility.launched ORDER, where ORDER is JSON."""

from __future__ import annotations

import importlib
import json
import sys

from compatibility.ranks import Order, run_case
from compatibility.table import CASES

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    order = Order(**{**request, "kill": request["kill"] and tuple(request["kill"])})
    # Not all of them: TRL takes long to import.
    importlib.import_module("compatibility.cases_loops")
    sys.exit(run_case(CASES[order.case], order))
