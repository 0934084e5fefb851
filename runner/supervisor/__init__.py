"""The runner's own processes: the supervisor on the first node and the followers on the others."""
