"""The bytes of a checkpoint and what they mean; no torch, no storage."""
