"""`runner plan`: estimated memory, goodput and cost of a run."""
