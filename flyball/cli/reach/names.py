"""Errors about names that are wrong: they say which similar ones there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from flyball.cli.reach.local_runs import known_names
from flyball.contracts.errors import NotFound

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient


@contextmanager
def found_or_near(client: ApiClient, path: str, key: str, name: str) -> Iterator[None]:
    """Add similar names, or some that exist, to a NotFound about `name`, which would be an item's `key` at `path`."""
    try:
        yield
    except NotFound:
        what = key.removesuffix("_id")
        names = [str(item[key]) for item in reversed(client.items(path))]
        hint = known_names(name, names, what)
        raise NotFound(f"{client.url} knows no {what} {name}.", hint=hint) from None


def host_or_near(client: ApiClient, name: str) -> AbstractContextManager[None]:
    """`found_or_near` for a host."""
    return found_or_near(client, "/v1/hosts", "host_id", name)
