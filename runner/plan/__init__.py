"""`runner plan`: what a run will need, computed before it is paid for."""
