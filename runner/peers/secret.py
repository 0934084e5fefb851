"""The secret that only the nodes of a run know, so that nobody else can speak to them."""

from __future__ import annotations

import os
import re
import secrets

from checkpointing.storage import Storage
from runner.errors import UsageError

VARIABLE = "RUNNER_SECRET"
RECORD_NAME = "secret"
_MIN_LENGTH = 16


def configured_secret() -> bytes | None:
    """Return the secret from the environment; None if it has none.

    Raises:
        UsageError: It is too short.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if len(text) < _MIN_LENGTH:
        raise UsageError(
            f"{VARIABLE} has {len(text)} characters; use {_MIN_LENGTH} or more, for example from: openssl rand -hex 32"
        )
    return text.encode()


def read_secret(storage: Storage) -> bytes | None:
    """Return the run's secret; None if neither the environment nor the location has one yet.

    Args:
        storage: The durable tier, which all nodes see.

    Raises:
        OSError: Storage refused.
        UsageError: The environment's is too short.
    """
    configured = configured_secret()
    if configured is not None:
        return configured
    found = storage.sidecars.read(RECORD_NAME).strip()
    return found if re.fullmatch(rb"[0-9a-f]{64}", found) else None


def ensure_secret(storage: Storage) -> bytes:
    """Return the run's secret; the location gets one if there is none.

    Args:
        storage: The durable tier, which all nodes see.

    Raises:
        OSError: Storage refused.
        UsageError: The environment's is too short.
    """
    secret = read_secret(storage)
    if secret is None:
        secret = secrets.token_hex(32).encode()
        storage.sidecars.write(RECORD_NAME, secret + b"\n")
    return secret
