"""A run on a simulated cluster, by the events of its failures."""
