"""Sends what a person must hear of to a webhook, signed."""

from __future__ import annotations

import hashlib
import hmac
import threading
from urllib.parse import urlsplit

from flyball.contracts.clock import Clock
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.wire import encode
from services.api.outgoing.delivery import DeliveryLoop, Json, Unsent, post


def check_url(url: str, setting: str = "webhook_url") -> None:
    """Raise ConfigurationError unless this is an http(s) URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{setting} is no http:// or https:// URL.", hint="https://alerts.example/flyball")


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """The value of Flyball-Signature: HMAC-SHA256 with the secret over "TIMESTAMP.BODY"."""
    return "sha256=" + hmac.new(secret.encode(), b"%d.%s" % (timestamp, body), hashlib.sha256).hexdigest()


class Webhook:
    """The loop that sends escalations."""

    def __init__(self, *, url: str, secret: str, escalations: Unsent, clock: Clock) -> None:
        check_url(url)
        self._url = url
        self._secret = secret
        self._clock = clock
        self._delivery = DeliveryLoop(name="webhook", unsent=escalations, send=self._send, clock=clock)

    def run(self, stop: threading.Event) -> None:
        """Run until stopped."""
        self._delivery.run(stop)

    def _send(self, number: int, story: Json) -> tuple[str, bool]:
        body = encode({"delivery": number, **story})
        timestamp = int(self._clock.wall_s())
        headers = {"Flyball-Delivery": str(number), "Flyball-Timestamp": str(timestamp)}
        if self._secret:
            headers["Flyball-Signature"] = signature(self._secret, timestamp, body)
        return post(self._url, body, headers)
