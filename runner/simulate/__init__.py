"""`runner simulate`: the goodput of a run under failures."""
