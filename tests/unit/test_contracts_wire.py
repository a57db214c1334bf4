from __future__ import annotations

import pytest

from ckpt_engine.notices import Notice
from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage, UsageError
from flyball.contracts.identity import Fence, check_name


@pytest.mark.parametrize("kind", [Fence, Notice, dict[str, Fence]])
@pytest.mark.parametrize("data", [b"", b"[]", b'{"type": "unheard of"}', b"\xff"])
def test_what_does_not_parse_is_an_invalid_message_whatever_was_expected(kind: type[object], data: bytes) -> None:
    with pytest.raises(InvalidMessage, match="Not a valid "):
        wire.decode(data, kind)


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a-", "a/b", "a\n", "a" * 64])
def test_names_that_cannot_be_part_of_a_path_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a usable name"):
        check_name("The job", name)
