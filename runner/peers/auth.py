"""The secret of a run, mutual authentication of two nodes that know it, and a code on each line that they exchange.

Only the nodes of a run know its secret, so that nobody else can speak to them. Nothing here speaks to another node.

Each side proves that it knows the run's secret by answering the other's random number with a keyed hash (three-pass
mutual authentication with a cryptographic check function, ISO/IEC 9798-4). The numbers also give each direction a key
of its own, so that lines cannot be forged, replayed, reordered or sent back. Lines are not encrypted.

    leader  challenge N1
    member  proof N2 HMAC(secret, "member", N1, N2)
    leader  proof HMAC(secret, "leader", N1, N2)
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from typing import Literal

from checkpointing.storage import Storage
from runner.errors import UsageError

VARIABLE = "RUNNER_SECRET"
RECORD_NAME = "secret"
_MIN_LENGTH = 16

Role = Literal["leader", "member"]
_CONTEXT = b"resilient-training peers 1"
_NONCE_BYTES = 32
# The longest line of the handshake: a word, a number and a code in hexadecimal digits.
MAX_HANDSHAKE_BYTES = 256


def configured_secret() -> bytes | None:
    """Return the secret from the environment, None if it has none; UsageError if it is too short."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if len(text) < _MIN_LENGTH:
        raise UsageError(
            f"{VARIABLE} has {len(text)} characters; use {_MIN_LENGTH} or more, for example from: openssl rand -hex 32"
        )
    return text.encode()


def read_secret(storage: Storage) -> bytes | None:
    """Return the run's secret; None if neither the environment nor the durable tier, which all nodes see, has one yet.

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
    """Return the run's secret; the durable tier gets one if there is none. Raises what `read_secret` raises."""
    secret = read_secret(storage)
    if secret is None:
        secret = secrets.token_hex(32).encode()
        storage.sidecars.write(RECORD_NAME, secret + b"\n", private=True)
    return secret


class WrongSecret(ValueError):
    """The other side speaks this protocol but does not know the secret."""


class PeerAuth:
    """One side of one connection.

    Attributes:
        done: Whether both sides have proved that they know the secret; lines are sealed from then on.
    """

    def __init__(self, secret: bytes, role: Role) -> None:
        self._secret, self._role = secret, role
        self._own = secrets.token_hex(_NONCE_BYTES).encode()
        self._both = b""
        self._keys: dict[str, bytes] = {}
        self._num_sealed = self._num_opened = 0
        self.done = False

    def opening(self) -> bytes:
        """Return the line with which this side begins; nothing if the other one does."""
        return b"challenge " + self._own + b"\n" if self._role == "leader" else b""

    def answer(self, line: bytes) -> bytes:
        """Return what to send on a line of the handshake, without its end; nothing once the other side has everything.

        Raises:
            WrongSecret: The proof is wrong.
            ValueError: It is no line of the handshake.
        """
        match self._role, line.split(b" "):
            case "member", [b"challenge", nonce] if not self._both and _is_hex(nonce):
                self._both = nonce + b" " + self._own
                return b"proof " + self._own + b" " + self._proof("member") + b"\n"
            case "leader", [b"proof", nonce, code] if _is_hex(nonce) and _is_hex(code):
                self._both = self._own + b" " + nonce
                self._check(code, "member")
                return b"proof " + self._proof("leader") + b"\n"
            case "member", [b"proof", code] if self._both and _is_hex(code):
                self._check(code, "leader")
                return b""
        raise ValueError("not a line of the handshake")

    def seal(self, line: bytes) -> bytes:
        """Return a line, without its end, with the code that the other side checks."""
        code = self._code(self._role, self._num_sealed, line)
        self._num_sealed += 1
        return code + b" " + line

    def open(self, line: bytes) -> bytes:
        """Return what the other side has sealed; ValueError if the code is wrong, or another line was expected."""
        code, _, text = line.partition(b" ")
        other: Role = "member" if self._role == "leader" else "leader"
        if not hmac.compare_digest(code, self._code(other, self._num_opened, text)):
            raise ValueError("a line with a wrong code")
        self._num_opened += 1
        return text

    def _check(self, code: bytes, prover: Role) -> None:
        if not hmac.compare_digest(code, self._proof(prover)):
            raise WrongSecret("the other side has another secret")
        for role in ("leader", "member"):
            self._keys[role] = _hash(self._secret, b"key", role.encode(), self._both)
        self.done = True

    def _proof(self, prover: Role) -> bytes:
        return _hash(self._secret, b"proof", prover.encode(), self._both)

    def _code(self, sender: Role, number: int, line: bytes) -> bytes:
        return _hash(self._keys[sender], b"line", str(number).encode(), line)


def _hash(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b" ".join((_CONTEXT, *parts)), hashlib.sha256).hexdigest().encode()


def _is_hex(text: bytes) -> bool:
    return len(text) == 64 and not text.strip(b"0123456789abcdef")
