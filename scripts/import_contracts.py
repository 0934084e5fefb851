"""A contract type for import-linter: packages that only the listed modules may import.

The inverse of import-linter's `forbidden`, which lists the modules that may not: here a new file is guarded as soon as
it exists.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class ReservedContract(Contract):
    """Only `allowed_modules`, and what is below them, may import `packages`, directly or through other modules.

    A module that reaches a package only through an allowed module breaks the contract as well: importing it would load
    the package.
    """

    type_name = "reserved"

    packages = fields.ListField(subfield=fields.StringField())
    allowed_modules = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        allowed = tuple(str(name) for name in self.allowed_modules)  # type: ignore[attr-defined]
        missing = [name for name in allowed if name not in graph.modules]
        if missing:
            raise ValueError(f"allowed_modules names modules that do not exist: {', '.join(missing)}")
        roots = {name.partition(".")[0] for name in allowed}
        guarded = [
            module
            for module in sorted(graph.modules)
            if module.partition(".")[0] in roots
            and module not in roots
            and not any(module == name or module.startswith(f"{name}.") for name in allowed)
        ]
        chains = [
            chain
            for package in (str(name) for name in self.packages)  # type: ignore[attr-defined]
            if package in graph.modules
            for module in guarded
            if (chain := graph.find_shortest_chain(module, package)) is not None
        ]
        return ContractCheck(kept=not chains, metadata={"chains": chains})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for chain in check.metadata["chains"]:
            output.print_error(" -> ".join(chain))
        output.print_error("Add the importing module to allowed_modules in pyproject.toml if it has to import this.")
