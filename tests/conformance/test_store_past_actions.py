"""What a view tells of a job's past: read once for each of its incidents and actions, whatever other jobs do."""

from __future__ import annotations

import msgspec


def test_the_past_of_a_job_is_read_again_only_when_its_own_incidents_or_actions_change(
    stores, make, statements: list[str]
) -> None:
    stores.run_job()
    stores.place("other", 1, "host-c")
    stores.begin_restart()

    def reads() -> int:
        """How many jobs' pasts a view reads. It shows what a fresh reader finds."""
        statements.clear()
        view = stores.decisions.load_view()
        count = sum("actions.started_at >" in statement for statement in statements)
        fresh = stores.other_decisions().load_view()
        assert [(job.recoveries, job.acted_at) for job in view.jobs] == [
            (job.recoveries, job.acted_at) for job in fresh.jobs
        ]
        return count

    assert (reads(), reads()) == (1, 0)
    elsewhere = msgspec.structs.replace(make.incident(2, "deciding", host_id="host-c"), job="other")
    stores.commit(incidents=(elsewhere,))
    assert (reads(), reads()) == (1, 0), "of the other job alone"
    stores.commit(incidents=(msgspec.structs.replace(elsewhere, message="It is another one."),))
    assert reads() == 0
    stores.commit(incidents=(make.incident(3, "deciding"),))
    assert (reads(), reads()) == (1, 0)
    closed = msgspec.structs.replace(elsewhere, state=type(elsewhere.state)("resolved"))
    stores.commit(incidents=(closed,))
    assert (reads(), reads()) == (1, 0), "the next incident must find what was done about this one"


def test_an_open_incident_is_decoded_once_until_it_changes(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    (first,), (again,) = (stores.decisions.load_view().incidents for _ in range(2))
    assert again is first
    stores.commit(incidents=(msgspec.structs.replace(first, message="It is another one."),))
    assert stores.decisions.load_view().incidents[0].message == "It is another one."
