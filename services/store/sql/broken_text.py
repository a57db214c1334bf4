"""Reads text that is not valid UTF-8: the drivers would raise, and take the whole query with them.

SQLite stores any bytes as text, or as a blob in a column of text, and MariaDB stores surrogates. Each such byte becomes
U+001A (SUBSTITUTE). JSON allows that character nowhere, so a document with such a byte cannot be decoded, and its row
is set aside as any other.
"""

from __future__ import annotations

import codecs
from typing import Any

import sqlalchemy
from sqlalchemy import Dialect
from sqlalchemy.types import TypeEngine

MARK = "\x1a"
MYSQL_ENCODING = "flyball-utf8"  # what PyMySQL decodes by
_HANDLER = "flyball-mark"


def text_of(data: bytes) -> str:
    """The text that these bytes are, with a mark for each that is none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", _HANDLER)


class _Read(TypeEngine[str]):
    """A column that is read as text, also where SQLite has a blob."""

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:  # noqa: ANN401 - SQLAlchemy's alias is private
        if dialect.name == "sqlite":
            return _read
        return super().result_processor(dialect, coltype)


class String(_Read, sqlalchemy.String):
    pass


class Text(_Read, sqlalchemy.Text):
    pass


def _read(value: str | bytes | None) -> str | None:
    return text_of(value) if isinstance(value, bytes) else value


def _marked(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return MARK * (error.end - error.start), error.end


def _codec(name: str) -> codecs.CodecInfo | None:
    if name.replace("_", "-") != MYSQL_ENCODING:
        return None

    def decoded(data: Any, _errors: str = "strict") -> tuple[str, int]:  # noqa: ANN401 - any buffer
        return text_of(bytes(data)), len(data)

    return codecs.CodecInfo(codecs.utf_8_encode, decoded, name=MYSQL_ENCODING)


codecs.register_error(_HANDLER, _marked)
codecs.register(_codec)
