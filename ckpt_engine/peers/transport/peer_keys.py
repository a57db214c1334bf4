"""Which engine may speak for which host: keys that the supervisor gave to exactly these two hosts.

The supervisor has a key per host, the answer key, and gives it to that host alone. From it and the names of a job and
of a caller follows the call key, which it gives to that caller alone, for the hosts that the caller has to reach in
that job. So both ends of a connection can prove who they are, and for which job they were brought together. A third
host cannot, though it has the key that all engines of the cluster share. (Needham and Schroeder, Using encryption for
authentication in large networks of computers, 1978; with keys that are derived, not stored.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog

from flyball.contracts.credentials import EngineKeys, engine_call_key
from flyball.contracts.errors import FlyballError, Unauthorized

log = structlog.get_logger()

KEPT_ANSWER_KEYS = 2  # the cluster's secret may be replaced while generations run


class PeerKeys:
    """This engine's keys. Thread-safe."""

    def __init__(
        self, shared: bytes, answer_keys: Sequence[str] = (), store: Callable[[Sequence[str]], None] = lambda keys: None
    ) -> None:
        """`shared`: of all engines of the cluster. It opens connections only for jobs that brought no keys, as those of
        a supervisor of an earlier release. `answer_keys`: as `store` got them last, newest first."""
        self._shared = shared
        self._store = store
        self._lock = threading.Lock()
        self._answer_keys = tuple(answer_keys)
        self._is_unstored = False  # as logged
        # job -> host -> key, the newest job last; None: the job brought no keys, and goes on by the shared one
        self._call_keys: dict[str, dict[str, str] | None] = {}

    def learn(self, job: str, given: EngineKeys, *, resumed: bool = False) -> None:
        """What the command that began a generation of the job brought. Raises what `store` raises. `resumed`: an engine
        before this one was given it. Keys that are known then keep their place: it says nothing about their age."""
        calls = dict(given.calls) if given.answer or given.calls else None
        with self._lock:
            if job not in self._call_keys or self._call_keys[job] != calls:
                self._call_keys.pop(job, None)
                self._call_keys[job] = calls
            self._learn_answer_locked(given.answer, resumed=resumed)

    def learn_answer(self, key: str) -> None:
        """This host's answer key, by the supervisor that acts. Without room to store it, it is learned later."""
        with self._lock:
            try:
                self._learn_answer_locked(key)
            except (FlyballError, OSError) as error:
                if not self._is_unstored:
                    log.warning("answer_key_not_stored", reason=str(error))
                self._is_unstored = True
            else:
                self._is_unstored = False

    def _learn_answer_locked(self, key: str, *, resumed: bool = False) -> None:
        if not key or key in (self._answer_keys if resumed else self._answer_keys[:1]):
            return
        others = [known for known in self._answer_keys if known != key]
        keys = ((*others[:1], key) if resumed else (key, *others))[:KEPT_ANSWER_KEYS]
        self._store(keys)
        self._answer_keys = keys

    def forget(self, job: str) -> None:
        """The job has ended here."""
        with self._lock:
            self._call_keys.pop(job, None)

    def to_call(self, host_id: str, job: str = "") -> tuple[str, bytes]:
        """The job to name and the key to use: for this job or, without one, for the newest that both hosts have. Its
        key is of the newest secret."""
        with self._lock:
            names = [job] if job else list(reversed(self._call_keys))
            for name in names:
                key = (self._call_keys.get(name) or {}).get(host_id)
                if key is not None:
                    return name, key.encode()
            return "", self._shared

    def may_share(self, job: str) -> bool:
        """Whether the shared key is enough to speak about the job."""
        with self._lock:
            return not self._answer_keys or self._call_keys.get(job, {}) is None

    def to_answer(self, host_id: str, job: str) -> Sequence[bytes]:
        """The keys with which a caller may prove to be this host, called for this job. Raises Unauthorized if it names
        no job, and has to."""
        with self._lock:
            if not job and (not self._answer_keys or None in self._call_keys.values()):
                return (self._shared,)  # `may_share` says what for
            if not self._answer_keys:
                return ()
            if not job:
                raise Unauthorized(
                    f"A caller that claims to be the engine of {host_id} has no key for this host.",
                    hint="run the same release of Flyball on all hosts; the next generation brings the keys",
                )
            return [engine_call_key(key, job, host_id).encode() for key in self._answer_keys]
