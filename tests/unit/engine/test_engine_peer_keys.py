"""Who may speak for which host: keys that two hosts got from the supervisor, and no third one has."""

from __future__ import annotations

import socket
import threading

import pytest
from support.jobs.placements import make_placement

from ckpt_engine.peers.transport.handshake import admit, introduce
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import ByteCounters, Identity
from ckpt_engine.peers.transport.tcp import TcpConnection
from ckpt_engine.settings import EngineSettings
from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier
from flyball.contracts.credentials import EngineKeys
from flyball.contracts.errors import FlyballError, Unauthorized
from services.rules.engine_keys import EngineKeyring

SHARED = b"the key that all engines share"
RING = EngineKeyring("the secret of a test's cluster")
PLACEMENT = make_placement({"a": (0,), "b": (1,)}, generation=3)


def engine(host_id: str, *, ring: EngineKeyring = RING, job: str = "job") -> PeerKeys:
    """The keys of a host after a start command of this job."""
    keys = PeerKeys(SHARED)
    keys.learn(job, ring.keys_of(host_id, PLACEMENT))
    return keys


def meet(caller: PeerKeys, answerer: PeerKeys, *, called: str = "b", name: str = "a", job: str = "job") -> Identity:
    """`caller` calls host `called` as host `name`. Returns who the other side takes it for. Raises what ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=60)
        theirs = listener.accept()[0]
    settings, outcome = EngineSettings(), list[Identity | FlyballError]()
    accepting = TcpConnection(theirs, settings, ByteCounters())

    def accept() -> None:
        identity = Identity(called, "", "2")
        with accepting:
            try:
                admit(accepting, identity=identity, keys_of=answerer.to_answer, timeout_s=60, on_shown=lambda: None)
                outcome.append(accepting.peer)
            except FlyballError as error:
                outcome.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    named, token = caller.to_call(called, job)
    with TcpConnection(ours, settings, ByteCounters()) as calling:
        try:
            introduce(calling, identity=Identity(name, "", "1", named), token=token, timeout_s=60)
        except FlyballError:
            thread.join(60)
            raise
    thread.join(60)
    (found,) = outcome
    assert isinstance(found, Identity), found
    return found


def test_hosts_of_a_job_know_each_other() -> None:
    assert meet(engine("a"), engine("b")) == Identity("a", "", "1", "job")
    assert meet(engine("b"), engine("a"), called="a", name="b") == Identity("b", "", "1", "job")


@pytest.mark.parametrize(
    "stranger",
    [
        PeerKeys(SHARED),  # has the key that all share
        engine("c"),  # of another job, placed by the same supervisor
        engine("a", ring=EngineKeyring("of another cluster")),
    ],
)
def test_a_third_host_cannot_speak_for_another(stranger: PeerKeys) -> None:
    with pytest.raises(Unauthorized):
        meet(stranger, engine("b"), name="a")


def test_a_host_cannot_answer_for_another() -> None:
    with pytest.raises(Unauthorized):
        meet(engine("a"), engine("c"), called="b")  # c answers at b's address


def test_a_key_is_for_one_job() -> None:
    both = engine("a")
    both.learn("other", RING.keys_of("a", make_placement({"a": (0,), "b": (1,)}, generation=1, job="other")))
    assert meet(both, engine("b"), job="other").job == "other"  # b knows it from its own key
    taken = PeerKeys(SHARED)
    taken.learn("other", EngineKeys("", engine_calls("job")))
    with pytest.raises(Unauthorized):
        meet(taken, engine("b"), job="other")


def engine_calls(job: str) -> dict[str, str]:
    return dict(RING.keys_of("a", make_placement({"a": (0,), "b": (1,)}, generation=3, job=job)).calls)


def test_the_shared_key_counts_until_a_host_was_given_its_own() -> None:
    older = PeerKeys(SHARED)
    assert meet(PeerKeys(SHARED), older, job="").host_id == "a"
    older.learn("job", RING.keys_of("b", PLACEMENT))
    with pytest.raises(Unauthorized):
        meet(PeerKeys(SHARED), older, job="")


def test_answer_keys_outlive_a_new_secret_once_and_the_process() -> None:
    stored: list[tuple[str, ...]] = []
    keys = PeerKeys(SHARED, (), lambda found: stored.append(tuple(found)))
    keys.learn("job", RING.keys_of("b", PLACEMENT))
    keys.learn("job", RING.keys_of("b", PLACEMENT))
    assert len(stored) == 1
    keys.learn("job", EngineKeyring("a new secret").keys_of("b", PLACEMENT))
    again = PeerKeys(SHARED, stored[-1])
    assert meet(engine("a"), again).host_id == "a"
    again.learn("job", EngineKeyring("a newer secret").keys_of("b", PLACEMENT))
    with pytest.raises(Unauthorized):
        meet(engine("a"), again)


def test_a_host_gets_keys_for_the_hosts_that_it_deals_with() -> None:
    sources = {"0": (ShardSource(0, 2, Tier.PEER, "d", ""), ShardSource(0, 2, Tier.PERSISTENT, "", ""))}
    placement = make_placement({"a": (0,), "b": (1,)}, generation=3, restore=RestorePlan(5, sources))
    assert set(RING.keys_of("a", placement).calls) == {"b", "d"}
    assert "EngineKeys()" in repr(RING.keys_of("a", placement))


def keys_of(host_id: str, job: str, *, ring: EngineKeyring = RING) -> EngineKeys:
    return ring.keys_of(host_id, make_placement({"a": (0,), "b": (1,)}, generation=1, job=job))


def test_a_job_without_keys_goes_on_by_the_shared_key_and_only_that_job() -> None:
    caller, answerer = PeerKeys(SHARED), engine("b")
    answerer.learn("older", EngineKeys())  # begun by a supervisor of an earlier release
    caller.learn("older", EngineKeys())
    assert meet(caller, answerer, job="older") == Identity("a", "", "1", "")
    assert answerer.may_share("older")
    assert not answerer.may_share("job")
    assert not answerer.may_share("one that ended")
    answerer.learn("older", keys_of("b", "older"))  # its next generation
    assert not answerer.may_share("older")
    with pytest.raises(Unauthorized):
        meet(caller, answerer, job="older")


def test_a_link_is_of_the_newest_job() -> None:
    keys = PeerKeys(SHARED)
    for job in ("first", "second", "third"):
        keys.learn(job, keys_of("a", job))
    keys.learn("third", EngineKeys())
    keys.learn("first", keys_of("a", "first"))  # a daemon that restarted says again what runs
    assert keys.to_call("b")[0] == "second"
    keys.learn("first", keys_of("a", "first", ring=EngineKeyring("a new secret")))
    assert keys.to_call("b")[0] == "first"
    assert keys.to_call("b", "third") == ("", SHARED)


def test_what_an_engine_resumes_does_not_reorder_its_answer_keys() -> None:
    stored: list[tuple[str, ...]] = []
    newer = EngineKeyring("a new secret")
    first = PeerKeys(SHARED, (), lambda found: stored.append(tuple(found)))
    first.learn("old", keys_of("b", "old"))
    first.learn("new", keys_of("b", "new", ring=newer))
    again = PeerKeys(SHARED, stored[-1], lambda found: stored.append(tuple(found)))
    again.learn("new", keys_of("b", "new", ring=newer), resumed=True)
    again.learn("old", keys_of("b", "old"), resumed=True)
    assert len(stored) == 2
    again.learn("newest", keys_of("b", "newest", ring=EngineKeyring("the newest")))
    assert stored[-1][1] == keys_of("b", "new", ring=newer).answer


def test_a_host_that_a_job_left_gives_out_what_it_holds_after_a_new_secret_and_after_an_upgrade() -> None:
    newer = EngineKeyring("a new secret")
    caller = engine("a", ring=newer)
    for left in (engine("b"), PeerKeys(SHARED)):  # under the old secret; by a supervisor of an earlier release
        with pytest.raises(Unauthorized):
            meet(caller, left)
        left.learn_answer(newer.answering("b").answer)  # as its daemon polls
        assert meet(caller, left).host_id == "a"
        left.learn_answer("")
        assert meet(caller, left).host_id == "a"
