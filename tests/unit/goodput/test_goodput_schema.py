"""The JSON report is an interface: its schema is pinned, fields are only added, and docs/reference/goodput/measures.md
documents each."""

from __future__ import annotations

import json
from pathlib import Path

from flyball.contracts.events import Event, EventKind
from goodput.account.losses import Loss
from goodput.calculator import SCHEMA, GoodputReport, IncidentReport, Steps, calculate
from goodput.show.report import to_json
from goodput.show.schema import report_schema

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "goodput"
# Fields of the first release. Readers of reports rely on them as long as SCHEMA is the same.
FIRST = {
    GoodputReport: "schema job outcome started_at ended_at elapsed_s goodput ettr seconds_by_category badput_s "
    "incidents interruptions mttr_s mttf_s steps notes",
    IncidentReport: "incident_id cause outcome began_at began_is_estimate detected_s decided_s resumed_s decisions "
    "lost_steps seconds_by_category badput_s",
    Steps: "kept recomputed newest median_s",
}
ASKED_FOR = "elapsed_s goodput ettr seconds_by_category incidents mttf_s mttr_s recommendation"


def test_the_schema_is_the_one_in_the_docs() -> None:
    pinned = json.loads((DOCS / "report.schema.json").read_text())
    assert json.loads(json.dumps(report_schema())) == pinned, (
        "fields were added? python -m goodput.show.schema > docs/reference/goodput/report.schema.json; were any "
        "changed? name a new SCHEMA"
    )


def test_fields_are_only_added() -> None:
    assert SCHEMA == "flyball.goodput.v1"
    for struct, names in FIRST.items():
        assert set(names.split()) <= set(struct.__struct_fields__)


def test_the_top_level_fields_are_all_documented() -> None:
    report = to_json(calculate([Event(0.0, EventKind.JOB_SUBMITTED, "gpt"), Event(5.0, EventKind.JOB_ENDED, "gpt")]))
    assert set(ASKED_FOR.split()) <= set(report)
    page = (DOCS / "measures.md").read_text()
    fields = (*GoodputReport.__struct_fields__, *IncidentReport.__struct_fields__, *Loss.__struct_fields__)
    assert [name for name in fields if f"`{name}`" not in page] == []
