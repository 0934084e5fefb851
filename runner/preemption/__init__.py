"""Preemption notices of cloud providers."""
