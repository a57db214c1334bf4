"""Gives each host the keys with which its engine knows, and calls, the engines of the hosts of its job. Pure.

They are added to a start command, and to each reply to a poll, as it is handed out, so no database has them.
`ckpt_engine.peers.transport.peer_keys` says what they are for.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.cluster import Placement
from flyball.contracts.credentials import EngineKeys, engine_answer_key, engine_call_key
from flyball.contracts.decisions import Command, StartWorkers


class EngineKeyring:
    """Of one cluster, by its secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def handed_out(self, host_id: str, command: Command) -> Command:
        """The command as this host gets it."""
        body = command.body
        if not isinstance(body, StartWorkers):
            return command
        keys = self.keys_of(host_id, body.placement)
        return msgspec.structs.replace(command, body=msgspec.structs.replace(body, keys=keys))

    def answering(self, host_id: str) -> EngineKeys:
        """The key with which this host's engine knows its callers, whether it has a job or not."""
        return EngineKeys(engine_answer_key(self._secret, host_id))

    def keys_of(self, host_id: str, part: Placement) -> EngineKeys:
        """For a host's part of a placement, with the hosts from which it may restore."""
        sources = part.restore.sources.values() if part.restore is not None else ()
        others = {source.host_id for of_rank in sources for source in of_rank if source.host_id}
        others |= {host.host_id for host in part.hosts}
        return EngineKeys(
            answer=engine_answer_key(self._secret, host_id),
            calls={
                other: engine_call_key(engine_answer_key(self._secret, other), part.job, host_id)
                for other in sorted(others - {host_id})
            },
        )
