"""The JSON Schema of a report: the content of docs/reference/goodput/report.schema.json.

python -m goodput.show.schema > docs/reference/goodput/report.schema.json
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from goodput.calculator import SCHEMA, GoodputReport


def report_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the JSON from `flyball goodput report -o json` and `GET /v1/goodput`."""
    found = msgspec.json.schema(GoodputReport)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Goodput report, {SCHEMA}",
        "description": "New fields may appear under the same `schema`; existing ones never change their meaning.",
        **found,
    }


if __name__ == "__main__":
    sys.stdout.write(
        msgspec.json.format(msgspec.json.encode(report_schema(), order="sorted"), indent=2).decode() + "\n"
    )
