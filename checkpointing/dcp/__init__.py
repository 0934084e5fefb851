"""Puts commit and verification under `torch.distributed.checkpoint`: its `save`, `async_save` and `load`.

    from checkpointing.dcp import protect

    protect()

From then on a checkpoint appears whole or not at all, and what is loaded is what was saved: its digests are compared.
Torch's own readers, and tools such as `dcp_to_torch_save`, read such checkpoints as ever. `runner start` does this for
every program that uses `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from checkpointing.dcp.protected_calls import protect

__all__ = ["protect"]
