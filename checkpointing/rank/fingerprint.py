"""Fingerprints of tensors, by which ranks find out that their replicas differ."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def fingerprint(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum each tensor's bytes as 64-bit words, with wrap-around.

    This runs at memory speed, on the device that holds the tensor. Changing any one value changes the sum.

    Args:
        tensors: Contiguous uint8 tensors with one dimension.

    Returns:
        An int64 tensor on the CPU with one sum per tensor.
    """
    sums = []
    for flat in tensors:
        words = flat.numel() // 8
        aligned = flat.data_ptr() % 8 == 0
        total = flat[: words * 8].view(torch.int64).sum() if aligned else flat[: words * 8].sum(dtype=torch.int64)
        sums.append(total + flat[words * 8 :].sum(dtype=torch.int64))
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    # Part of an optimizer's state may be on the host. Waiting once per device is enough.
    found = torch.empty(len(sums), dtype=torch.int64)
    for device in {total.device for total in sums}:
        numbers = [number for number, total in enumerate(sums) if total.device == device]
        found[numbers] = torch.stack([sums[number] for number in numbers]).cpu()
    return found
