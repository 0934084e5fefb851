"""Failure classes and the policy that decides what follows a failure. Pure, except for the evidence it reads."""
