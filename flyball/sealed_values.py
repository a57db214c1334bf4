"""Secret variables of a job: encrypted where the job is submitted, decrypted by the host daemon that starts a worker.
In between (API, database, outbox, the daemon's own file) only the cluster's peer key decrypts them. Hosts have that
key, databases do not.

ChaCha20-Poly1305 with a random nonce per value; the job and the variable's name are authenticated with it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping

from flyball.contracts.credentials import PREFIXES, host_credential, mac
from flyball.contracts.errors import ConfigurationError

_NONCE_BYTES = 12


def seal(values: Mapping[str, str], *, secret: str, job: str) -> dict[str, str]:
    """Encrypt with the operator's token. Raises ConfigurationError for any other token."""
    if not values:
        return {}
    if secret.startswith(PREFIXES):
        raise ConfigurationError(
            f"Secret variables ({', '.join(sorted(values))}) need the operator's token.",
            hint="submit with it (--token-file, FLYBALL_TOKEN), or forward no secrets: see --env",
        )
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    cipher = ChaCha20Poly1305(_key(host_credential(secret, "any").peer_key))
    sealed = {}
    for name, value in values.items():
        nonce = os.urandom(_NONCE_BYTES)
        box = nonce + cipher.encrypt(nonce, value.encode(), _context(job, name))
        sealed[name] = base64.b64encode(box).decode()
    return sealed


def unseal(sealed: Mapping[str, str], *, peer_key: str, job: str) -> dict[str, str]:
    """Decrypt the values. Raises ConfigurationError if they were sealed with another key, or altered."""
    if not sealed:
        return {}
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    cipher = ChaCha20Poly1305(_key(peer_key))
    values = {}
    for name, text in sealed.items():
        try:
            box = base64.b64decode(text, validate=True)
            values[name] = cipher.decrypt(box[:_NONCE_BYTES], box[_NONCE_BYTES:], _context(job, name)).decode()
        except (InvalidTag, ValueError) as error:
            raise ConfigurationError(
                f"The secret variable {name} of job {job} cannot be decrypted here.",
                hint="the cluster's secret changed after the job was submitted: submit it again",
            ) from error
    return values


def _key(peer_key: str) -> bytes:
    return base64.urlsafe_b64decode(mac(peer_key.encode(), b"flyball job environment v1") + b"=")


def _context(job: str, name: str) -> bytes:
    return f"{job}\0{name}".encode()
