"""Keeps passwords and tokens of a command line out of what a run records of its job."""

from __future__ import annotations

import math
import re
from collections import Counter
from hashlib import sha256
from typing import Any

_MASK = "(not-recorded)"
# Names whose values are never recorded. `token` alone is one; `pad_token` and its kind describe the job.
_NAME = re.compile(
    r"(?:(?:\w*_)?(?:hub|hf|hugging_?face|access|auth|api|bearer|wandb|session|security|git(?:hub|lab)?|refresh)_)?token"
    r"|(?:\w*_)?(?:(?:api|wandb|access|private|secret|comet|neptune|license)_?key(?:_id)?|password|passwd|passphrase"
    r"|secret|credentials?)"
    r"|aws_\w*(?:key|token|secret)\w*",
    re.IGNORECASE,
)
# Values that are secrets, whatever they are called: what their issuers begin them with, and passwords in addresses.
_VALUE = re.compile(
    r"(?<![\w-])(?:hf_(?=[a-z0-9]*[A-Z])(?=[A-Za-z]*\d)[A-Za-z0-9]{24,}|sk-(?=[\w-]*[A-Z])(?=[\w-]*\d)[\w-]{20,}"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{12,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|wandb_v\d_\w{16,})"
    r"|(?<=://)[^/@\s]+(?=@)"
)
# Others look random: long, of upper and lower case letters and digits, or hexadecimal as the keys of W&B.
_WORD = re.compile(
    r"(?<![\w/+.-])(?=[\w/+-]*[a-z])(?=[\w/+-]*[A-Z])(?=[\w/+-]*\d)"
    r"(?:[A-Za-z0-9_-]{32,}={0,2}|[A-Za-z0-9/+]{40})(?![\w/+.-])"
)
_HEX = re.compile(r"(?<![\w/.-])[0-9a-fA-F]{40,}(?![\w/.-])")
_MIN_BITS = 3.8


def is_secret(name: str) -> bool:
    """Return whether an option or key is called as secrets are; of a dotted name the last part counts."""
    return _NAME.fullmatch(name.rpartition(".")[2].lstrip("-+").replace("-", "_")) is not None


def masked(value: Any) -> Any:
    """Return a value without the secrets in its texts.

    One of a known kind becomes the same text always, as it may be renewed in the course of a run. What only looks
    random may be a revision: it becomes a digest, so that another one is another job.
    """
    if isinstance(value, str):
        words = re.split(r"(\s+)", value)
        return "".join(map(_masked_word, words))
    if isinstance(value, dict):
        return {name: _MASK if is_secret(str(name)) else masked(one) for name, one in value.items()}
    return [masked(one) for one in value] if isinstance(value, list) else value


def _masked_word(word: str) -> str:
    name, separator, rest = word.partition("=")
    if separator and rest and is_secret(name):
        return f"{name}={_MASK}"
    word = _VALUE.sub(_MASK, word)
    for pattern in (_WORD, _HEX):
        word = pattern.sub(lambda found: _digested(found[0]), word)
    return word


def _digested(text: str) -> str:
    counts = Counter(text)
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())
    least = _MIN_BITS if not _HEX.fullmatch(text) else 3.0
    return text if bits < least else f"(sha256-{sha256(text.encode()).hexdigest()[:12]})"
