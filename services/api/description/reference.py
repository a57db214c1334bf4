"""The reference of the API, from its OpenAPI document: for the page /docs, and for the documentation's site. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

Json = dict[str, Any]
_REF = "#/components/schemas/"
_TITLES = {
    "jobs": "Jobs",
    "logs": "Logs",
    "observations": "Present state",
    "history": "What happened",
    "hosts": "Hosts",
    "orders": "Operators' orders",
    "audit": "Who did what",
    "events": "The event log",
    "health": "Health",
    "sensor": "Reports of daemons",
    "actuator": "Commands to daemons",
}


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of an operation."""

    name: str
    place: str  # query, path or header
    kind: str  # its type, with bounds
    default: str  # JSON; '': it has none
    required: bool
    description: str


class Operation(msgspec.Struct, frozen=True):
    """One method of one path."""

    name: str  # the operation id
    method: str
    path: str
    roles: tuple[str, ...]  # (): public
    description: str
    parameters: tuple[Parameter, ...]
    body: str  # name of its type; '': none
    replies: tuple[tuple[str, str], ...]  # status, and the name of the type or the media type


class Field(msgspec.Struct, frozen=True):
    """One field of a type."""

    name: str
    kind: str
    required: bool
    description: str


class Shape(msgspec.Struct, frozen=True):
    """One type of bodies: an object with fields, or a choice of words."""

    name: str
    description: str
    fields: tuple[Field, ...]
    words: tuple[str, ...]


class Section(msgspec.Struct, frozen=True):
    title: str
    operations: tuple[Operation, ...]


class Reference(msgspec.Struct, frozen=True):
    version: str
    sections: tuple[Section, ...]
    shapes: tuple[Shape, ...]


def reference(document: Json) -> Reference:
    """Return the reference of an OpenAPI document, in the order of its routes; types by name."""
    grouped: dict[str, list[Operation]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            found = _operation(method.upper(), path, operation)
            grouped.setdefault(operation["tags"][0], []).append(found)
    order = sorted(grouped, key=lambda tag: list(_TITLES).index(tag) if tag in _TITLES else len(_TITLES))
    return Reference(
        version=document["info"]["version"],
        sections=tuple(Section(_TITLES.get(tag, tag.capitalize()), tuple(grouped[tag])) for tag in order),
        shapes=tuple(_shape(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
    )


def _operation(method: str, path: str, operation: Json) -> Operation:
    return Operation(
        name=operation["operationId"],
        method=method,
        path=path,
        roles=tuple(operation["x-flyball-roles"]),
        description=_unfolded(operation.get("description", "")),
        parameters=tuple(map(_parameter, operation.get("parameters", ()))),
        body=_content(operation.get("requestBody", {})),
        replies=tuple(
            (status, _content(reply)) for status, reply in sorted(operation["responses"].items()) if status != "default"
        ),
    )


def _parameter(given: Json) -> Parameter:
    schema = given["schema"]
    return Parameter(
        name=given["name"],
        place=given["in"],
        kind=_kind(schema),
        default=msgspec.json.encode(schema["default"]).decode() if "default" in schema else "",
        required=given.get("required", False),
        description=given.get("description", ""),
    )


def _content(part: Json) -> str:
    for media_type, media in part.get("content", {}).items():
        return _kind(media["schema"]) if media.get("schema") else media_type
    return ""


def _shape(name: str, schema: Json) -> Shape:
    required = schema.get("required", ())
    return Shape(
        name=name,
        description=_unfolded(schema.get("description", "")),
        fields=tuple(
            Field(field, _kind(part), field in required, part.get("description", ""))
            for field, part in schema.get("properties", {}).items()
        ),
        words=tuple(map(str, schema.get("enum", ()))),
    )


def _kind(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REF)
    if "anyOf" in schema:
        kinds = dict.fromkeys(map(_kind, schema["anyOf"]))
        return " or ".join(kinds)
    if words := [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]:
        return " or ".join(msgspec.json.encode(word).decode() for word in words)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema['items'])}" if schema.get("items") else "list"
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        return f"map to {_kind(values)}"
    return kind + _bounds(schema)


def _bounds(schema: Json) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return "".join(f" {word} {schema[key]:g}" for key, word in words.items() if key in schema)


def _unfolded(text: str) -> str:
    """Return paragraphs, each on one line."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


# --- as Markdown ------------------------------------------------------------------------------------------------------


def markdown(found: Reference) -> str:
    """Return what the site adds to docs/reference/http-api.md."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Reference) -> Iterator[str]:
    yield "## Operations\n"
    yield "| operation | | |"
    yield "|---|---|---|"
    for operation in (one for section in found.sections for one in section.operations):
        yield f"| [{operation.name}](#{operation.name.lower()}) | {operation.method} | `{operation.path}` |"
    for section in found.sections:
        yield f"\n## {section.title}"
        for operation in section.operations:
            yield from _operation_lines(operation)
    yield "\n## Types"
    for shape in found.shapes:
        yield from _shape_lines(shape)


def _operation_lines(operation: Operation) -> Iterator[str]:
    yield f"\n### {operation.name}\n"
    yield f"`{operation.method} {operation.path}` ({', '.join(operation.roles) or 'public'})\n"
    yield operation.description
    if operation.parameters:
        yield "\n| parameter | in | type | default | |"
        yield "|---|---|---|---|---|"
        for one in operation.parameters:
            default = f"`{one.default}`" if one.default else "required" if one.required else ""
            yield f"| `{one.name}` | {one.place} | {_cell(one.kind)} | {default} | {_cell(one.description)} |"
    replies = "; ".join(f"{status}: {_linked(kind)}" if kind else status for status, kind in operation.replies)
    yield f"\n{f'Body: {_linked(operation.body)}. ' if operation.body else ''}Reply: {replies}."


def _shape_lines(shape: Shape) -> Iterator[str]:
    yield f"\n### {shape.name}\n"
    if shape.description:
        yield shape.description
    if shape.words:
        yield "\n" + ", ".join(f"`{word}`" for word in shape.words)
    if shape.fields:
        yield "\n| field | type | |"
        yield "|---|---|---|"
        for field in shape.fields:
            mark = "" if field.required else " (optional)"
            yield f"| `{field.name}`{mark} | {_cell(_linked(field.kind))} | {_cell(field.description)} |"


def _linked(kind: str) -> str:
    """Link the names of types, which begin with a capital letter."""
    return " ".join(f"[{word}](#{word.lower()})" if word[:1].isupper() else word for word in kind.split(" "))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
