"""Lists in pages: the newest first page, then what is older."""

from __future__ import annotations

import msgspec

DEFAULT_LIMIT = 200
MAX_LIMIT = 500


class Page(msgspec.Struct, frozen=True):
    """At most `limit` items, the newest of those before the item named `before` ('' for the newest of all) and, where a
    list has that, after the one named `after`."""

    limit: int = DEFAULT_LIMIT
    before: str = ""
    after: str = ""
