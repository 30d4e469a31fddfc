"""`horovod.runner.common.util.secret`: keys, and digests of messages that only their owners can make."""

from __future__ import annotations

import hmac
import secrets

DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """A new key of 32 bytes."""
    return secrets.token_bytes(32)


def compute_digest(key: bytes, body: bytes) -> bytes:
    """Of SHA-256."""
    return hmac.digest(key, body, "sha256")


def check_digest(key: bytes, body: bytes, digest: bytes) -> bool:
    """Whether the owner of the key made the digest."""
    return hmac.compare_digest(digest, compute_digest(key, body))
