"""Every resume proves itself: what is recomputed is compared with what was computed before."""
