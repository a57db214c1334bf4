"""What an object store's errors mean, and what to do about them. Pure.

obstore has few kinds of errors; the rest is in the answer that they quote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flyball.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    FlyballError,
    StorageFull,
    Unauthorized,
    Unreachable,
)

_MESSAGE_CHARACTERS = 300
_CODE = re.compile(r"<Code>(\w+)</Code>")


@dataclass(frozen=True, slots=True)
class _Meaning:
    phrases: tuple[str, ...]  # any of them, in the error's kind or text
    kind: type[FlyballError]
    message: str  # with {place}, {name} and {reason}
    hint: str


_NO_BUCKET = _Meaning(
    ("NoSuchBucket", "bucket does not exist", "ContainerNotFound"),
    ConfigurationError,
    "The bucket of {place} does not exist ({reason}).",
    "make it, or correct the persistent folder's URL",
)
_MEANINGS = (
    _Meaning(
        ("169.254.169.254", "metadata.google.internal"),  # asked when the environment has no credentials
        ConfigurationError,
        "There are no credentials for {place} ({reason}).",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of your store, in the environment of every host",
    ),
    _Meaning(
        ("PermissionDenied", "Unauthenticated", "403 Forbidden", "401 Unauthorized", "AccessDenied"),
        Unauthorized,
        "{place} denies access to '{name}' ({reason}).",
        "allow these credentials to list, read, write and delete there",
    ),
    _Meaning(
        ("507 Insufficient", "QuotaExceeded", "StorageFull"),
        StorageFull,
        "{place} has no room for {name} ({reason}).",
        "free space there, or keep fewer checkpoints",
    ),
    _Meaning(
        ("Encountered object with invalid path",),
        ConfigurationError,
        "{place} has an object whose name is no path ({reason}).",
        "remove it, or give the checkpoints a prefix of their own",
    ),
    _Meaning(
        ("error sending request", "timed out", "TimeoutError", "ConnectionError", " 500 ", " 502 ", " 503 ", " 504 "),
        Unreachable,
        "{place} does not answer ({reason}).",
        "see whether its endpoint (AWS_ENDPOINT_URL) is right and the network works",
    ),
    _Meaning(("ValueError",), ConfigurationError, "{place} cannot be used ({reason}).", "write s3://BUCKET/PREFIX"),
)
_OTHER = _Meaning((), CheckpointError, "{place}, '{name}': {reason}", "see what the store's own tools say about it")


def as_flyball_error(error: Exception, *, place: str, name: str) -> Exception:
    """The error to raise in place of obstore's: FileNotFoundError if the object does not exist, else a FlyballError
    with its hint."""
    text = f"{type(error).__name__}: {error}".lower()

    def says(meaning: _Meaning) -> bool:
        return any(phrase.lower() in text for phrase in meaning.phrases)

    if isinstance(error, FileNotFoundError) and not says(_NO_BUCKET):
        return FileNotFoundError(f"{place} has no {name}")
    meaning = next((known for known in (_NO_BUCKET, *_MEANINGS) if says(known)), _OTHER)
    message = meaning.message.format(place=place, name=name, reason=_shortened(str(error)))
    return meaning.kind(message, hint=meaning.hint)


def _shortened(text: str) -> str:
    """The first line, and the store's own code for what went wrong."""
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    code = _CODE.search(text)
    head = first.partition(": <?xml")[0][:_MESSAGE_CHARACTERS]
    return f"{head} {code[1]}" if code else head
