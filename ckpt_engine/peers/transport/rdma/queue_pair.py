"""A reliable queue pair: messages through registered buffers, one-sided reads and writes, and keys for them.

Used by one thread at a time. Nothing here waits.
"""

from __future__ import annotations

import mmap
import secrets
import select
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.peers.transport.rdma.completion_errors import DeviceLost, QueuePairError, completion_error
from ckpt_engine.peers.transport.rdma.device import OpenDevice
from ckpt_engine.peers.transport.rdma.messages import Kind, pack_immediate, unpack_immediate
from ckpt_engine.peers.transport.rdma.port_choice import links_differ
from ckpt_engine.peers.transport.rdma.registrations import Registration, address_of
from ckpt_engine.peers.transport.rdma.verbs import RdmaPort, load_pyverbs, no_gid
from ckpt_engine.peers.transport.rdma.verbs_errors import verbs_errors
from flyball.contracts.errors import InvalidMessage

log = structlog.get_logger()

BUFFER_BYTES: Final = 64 << 10
RECEIVE_BUFFERS: Final = 16
CREDIT_BUFFERS: Final = 6  # for messages that say how many buffers are free: each is for a quarter of them, or more
SEND_BUFFERS: Final = 8
_MOST_POSTED: Final = 128  # sends, reads, writes and changes of keys
_ALL_RECEIVE_BUFFERS: Final = RECEIVE_BUFFERS + CREDIT_BUFFERS
_SEND_QUEUE: Final = _MOST_POSTED + CREDIT_BUFFERS
_RECEIVES: Final = 1 << 63  # work request numbers from here on are receive buffers
_NO_PAYLOAD: Final = 1  # bytes: pyverbs sends no empty messages
_PER_POLL: Final = 16
_SUCCESS: Final = 0

_ACK_TIMEOUT: Final = 17  # 537 ms: a dead peer is noticed after 4 s on Soft-RoCE, or by its silence
_RETRIES: Final = 6  # with 7, Soft-RoCE did not notice a dead peer for 100 s
_RNR_RETRIES: Final = 6  # there is always a buffer, as the sender counts them
_RNR_TIMER: Final = 12  # 640 us
_HOPS: Final = 64


class Arrival(NamedTuple):
    """A message that has arrived. Its buffer must be given back."""

    kind: Kind
    amount: int  # bytes written, or buffers freed
    buffer: int
    size_bytes: int  # in the buffer


class QueuePair:
    """Connect it, then post and poll. Every method raises QueuePairError once it has failed."""

    def __init__(self, device: OpenDevice, port: RdmaPort, *, traffic_class: int = 0) -> None:
        """`traffic_class`: of the packets that this side sends, 0 to 255. Raises RdmaUnavailable if the port has no
        address, DeviceLost, DeviceRefused, OSError."""
        gid = port.gid
        if gid is None:
            raise no_gid([port])
        self._verbs = load_pyverbs()
        self._device = device
        self._port = port
        self._gid_index = gid.index
        self._traffic_class = traffic_class
        self._posted: dict[int, Callable[[], None]] = {}  # by number: what to do when it is done
        self._next_number = 0
        self._keys: dict[int, Any] = {}  # key -> memory window, or memory region
        self._closers: list[Callable[[], None]] = []
        device.enter()
        self._closers.append(device.leave)
        try:
            with verbs_errors():
                self._make(gid.text)
        except BaseException:
            self.close()
            raise

    def _make(self, gid: str) -> None:
        verbs, device = self._verbs, self._device
        enums = verbs.enums
        self._arena = mmap.mmap(-1, (_ALL_RECEIVE_BUFFERS + SEND_BUFFERS) * BUFFER_BYTES)
        self._closers.append(self._arena.close)
        self._base = address_of(self._arena)
        self._region = verbs.mr.MR(device.domain, len(self._arena), enums.IBV_ACCESS_LOCAL_WRITE, address=self._base)
        self._closers.append(self._region.close)
        channel, self.descriptor = device.open_channel()
        self._closers.append(partial(device.close_channel, channel))
        self._channel = channel
        self._events = select.poll()
        self._events.register(self.descriptor, select.POLLIN)
        self._queue = verbs.cq.CQ(device.context, _SEND_QUEUE + _ALL_RECEIVE_BUFFERS, None, channel, 0)
        self._closers.append(self._queue.close)
        capacity = verbs.qp.QPCap(max_send_wr=_SEND_QUEUE, max_recv_wr=_ALL_RECEIVE_BUFFERS)
        wanted = verbs.qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity)
        self._pair = verbs.qp.QP(device.domain, wanted)
        self._closers.append(self._pair.close)
        self._closers.append(self._end_keys)  # first: Soft-RoCE waits 50 s before it destroys a pair with bound windows
        self._free_buffers = list(range(_ALL_RECEIVE_BUFFERS, _ALL_RECEIVE_BUFFERS + SEND_BUFFERS))
        attributes = verbs.qp.QPAttr(qp_state=enums.IBV_QPS_INIT, port_num=self._port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
        self._pair.modify(attributes, _mask(enums, "STATE PKEY_INDEX PORT ACCESS_FLAGS"))
        for buffer in range(_ALL_RECEIVE_BUFFERS):
            self.give_back(buffer)
        self.endpoint = QueuePairEndpoint(
            qp_number=self._pair.qp_num,
            first_psn=secrets.randbelow(1 << 24),
            gid=gid.replace(":", ""),
            lid=self._port.lid,
            mtu_bytes=device.mtu_bytes(self._port.number),  # type: ignore[arg-type]  # one of the five that there are
            is_infiniband=self._port.is_infiniband,
            receive_buffers=RECEIVE_BUFFERS,
            receive_buffer_bytes=BUFFER_BYTES,
            reads=device.reads_answered,
        )

    def connect(self, remote: QueuePairEndpoint) -> None:
        """Ready to receive and to send. Raises RdmaUnavailable if the two sides' links differ, DeviceLost,
        DeviceRefused."""
        if remote.is_infiniband != self._port.is_infiniband:
            raise links_differ([self._port])
        verbs, enums = self._verbs, self._verbs.enums
        self.payload_bytes = min(BUFFER_BYTES, remote.receive_buffer_bytes)
        self.remote_buffers = remote.receive_buffers
        gid = verbs.addr.GID(":".join(remote.gid[start : start + 4] for start in range(0, 32, 4)))
        route = verbs.addr.GlobalRoute(
            dgid=gid, sgid_index=self._gid_index, hop_limit=_HOPS, traffic_class=self._traffic_class
        )
        with verbs_errors():
            attributes = verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RTR, port_num=self._port.number)
            attributes.ah_attr = verbs.addr.AHAttr(
                dlid=remote.lid, is_global=int(not remote.is_infiniband), port_num=self._port.number, gr=route
            )
            attributes.path_mtu = min(self.endpoint.mtu_bytes, remote.mtu_bytes).bit_length() - 8  # 256 is 1
            attributes.dest_qp_num = remote.qp_number
            attributes.rq_psn = remote.first_psn
            attributes.max_dest_rd_atomic = self.endpoint.reads
            attributes.min_rnr_timer = _RNR_TIMER
            self._pair.modify(
                attributes,
                _mask(enums, "STATE AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER"),
            )
            attributes.qp_state = enums.IBV_QPS_RTS
            attributes.timeout = _ACK_TIMEOUT
            attributes.retry_cnt = _RETRIES
            attributes.rnr_retry = _RNR_RETRIES
            attributes.sq_psn = self.endpoint.first_psn
            attributes.max_rd_atomic = min(self._device.reads_posted, remote.reads)
            self._pair.modify(attributes, _mask(enums, "STATE TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC"))

    # --- posting ---

    @property
    def posted(self) -> int:
        """What was posted and is not done, without receives."""
        return len(self._posted)

    @property
    def has_room(self) -> bool:
        """Whether one more message, read, write or change of a key can be posted."""
        return bool(self._free_buffers) and len(self._posted) < _MOST_POSTED

    def send(self, kind: Kind, fill: Callable[[memoryview], int], done: Callable[[], None]) -> None:
        """Send a message. `fill` writes its payload, `payload_bytes` at most, and returns its length. Needs room."""
        buffer = self._free_buffers.pop()
        try:
            size_bytes = fill(self.buffer(buffer)[: self.payload_bytes])
        except BaseException:
            self._free_buffers.append(buffer)
            raise

        def sent() -> None:
            self._free_buffers.append(buffer)
            done()

        flags = self._verbs.enums.IBV_SEND_SIGNALED | self._verbs.enums.IBV_SEND_SOLICITED
        address = self._base + buffer * BUFFER_BYTES
        self._post(
            self._verbs.enums.IBV_WR_SEND_WITH_IMM,
            sent,
            flags=flags,
            immediate=pack_immediate(kind),
            memory=(address, max(size_bytes, _NO_PAYLOAD), self._region.lkey),
        )

    def send_credit(self, count: int) -> None:
        """Tell how many receive buffers are free again. Needs no room, as it is sent for several at once."""
        self._post(
            self._verbs.enums.IBV_WR_SEND_WITH_IMM,
            _nothing,
            flags=self._verbs.enums.IBV_SEND_SIGNALED,
            immediate=pack_immediate(Kind.CREDIT, count),
            memory=(self._base, _NO_PAYLOAD, self._region.lkey),
        )

    def write(self, local: tuple[int, int, int], remote: tuple[int, int], done: Callable[[], None]) -> None:
        """WRITE, followed by the message PLACED. `local`: address, bytes and key; `remote`: address and key."""
        flags = self._verbs.enums.IBV_SEND_SIGNALED | self._verbs.enums.IBV_SEND_SOLICITED
        self._post(
            self._verbs.enums.IBV_WR_RDMA_WRITE_WITH_IMM,
            done,
            flags=flags,
            immediate=pack_immediate(Kind.PLACED, local[1]),
            memory=local,
            remote=remote,
        )

    def read(self, local: tuple[int, int, int], remote: tuple[int, int], done: Callable[[], None]) -> None:
        """READ. `local`: address, bytes and key; `remote`: address and key."""
        self._post(
            self._verbs.enums.IBV_WR_RDMA_READ,
            done,
            flags=self._verbs.enums.IBV_SEND_SIGNALED,
            memory=local,
            remote=remote,
        )

    def _post(
        self,
        opcode: int,
        done: Callable[[], None],
        *,
        flags: int,
        immediate: int = 0,
        memory: tuple[int, int, int],
        remote: tuple[int, int] | None = None,
    ) -> None:
        verbs = self._verbs
        element = verbs.wr.SGE(*memory)
        request = verbs.wr.SendWR(
            wr_id=self._next_number,
            opcode=opcode,
            num_sge=1,
            sg=[element],
            imm_data=socket.htonl(immediate),
            send_flags=flags,
        )
        if remote is not None:
            request.set_wr_rdma(remote[1], remote[0])
        try:
            self._post_request(request, done)
        finally:
            request.close()  # pyverbs frees neither when they are collected
            element.close()

    def _post_request(self, request: Any, done: Callable[[], None]) -> None:  # noqa: ANN401 - a pyverbs.wr.SendWR
        with verbs_errors():
            self._pair.post_send(request)
        self._posted[self._next_number] = done
        self._next_number += 1

    # --- keys ---

    def grant(self, registration: Registration, offset: int, size_bytes: int, *, write: bool) -> int:
        """A key with which the other side of this queue pair, and nobody else, can write (else: read) these bytes of a
        registered file, which lie in one region of it. Needs room."""
        enums, address = self._verbs.enums, registration.address + offset
        access = enums.IBV_ACCESS_REMOTE_WRITE if write else enums.IBV_ACCESS_REMOTE_READ
        with verbs_errors():
            if not self._device.has_windows:
                region = self._verbs.mr.MR(
                    self._device.domain, size_bytes, access | enums.IBV_ACCESS_LOCAL_WRITE, address=address
                )
                self._keys[region.rkey] = region
                return int(region.rkey)
            window = self._verbs.mr.MW(self._device.domain, enums.IBV_MW_TYPE_2)
            request = self._verbs.wr.SendWR(
                wr_id=self._next_number, opcode=enums.IBV_WR_BIND_MW, send_flags=enums.IBV_SEND_SIGNALED
            )
            try:
                bounds = self._verbs.mr.MWBindInfo(registration.region_at(offset).memory, address, size_bytes, access)
                request.set_bind_wr(window, bounds)
                key = int(request.rkey)
                self._keys[key] = window
                self._post_request(request, _nothing)
            finally:
                request.close()
        return key

    def revoke(self, key: int, done: Callable[[], None]) -> None:
        """Take a key back. Once it is done, the NIC refuses the key. Needs room."""

        def revoked() -> None:
            with verbs_errors():
                self._keys.pop(key).close()
            done()

        if not self._device.has_windows:
            revoked()
            return
        request = self._verbs.wr.SendWR(
            wr_id=self._next_number,
            opcode=self._verbs.enums.IBV_WR_LOCAL_INV,
            imm_data=key,  # pyverbs has no other name for it: they share their place in the structure
            send_flags=self._verbs.enums.IBV_SEND_SIGNALED,
        )
        try:
            self._post_request(request, revoked)
        finally:
            request.close()

    def _end_keys(self) -> None:
        """Each is a step of its own, and the next ones."""
        while self._keys:
            self._closers.append(self._keys.popitem()[1].close)

    # --- completions ---

    def poll(self) -> list[Arrival]:
        """The messages that have arrived. Calls the `done` of what was carried out. Raises QueuePairError at the first
        failure, InvalidMessage."""
        arrived: list[Arrival] = []
        while True:
            with verbs_errors():
                count, completions = self._queue.poll(_PER_POLL)
            for completion in completions:
                if completion.status != _SUCCESS:
                    raise completion_error(int(completion.status), int(completion.vendor_err))
                if completion.wr_id >= _RECEIVES:
                    arrived.append(self._received(completion))
                else:
                    self._posted.pop(completion.wr_id)()
            if count < _PER_POLL:
                return arrived

    def _received(self, completion: Any) -> Arrival:  # noqa: ANN401 - a pyverbs.cq.WC
        kind, count = unpack_immediate(socket.ntohl(completion.imm_data))
        is_write = completion.opcode == self._verbs.enums.IBV_WC_RECV_RDMA_WITH_IMM
        if is_write is not (kind is Kind.PLACED):
            raise InvalidMessage(f"A message of kind {kind.name} arrived over RDMA in the wrong way.")
        buffer = completion.wr_id - _RECEIVES
        if is_write and count != completion.byte_len:
            raise InvalidMessage(f"{completion.byte_len} bytes were written, {count} were announced.")
        return Arrival(kind, count, buffer, 0 if is_write else completion.byte_len)

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._arena)[index * BUFFER_BYTES : (index + 1) * BUFFER_BYTES]

    def give_back(self, buffer: int) -> None:
        """The message in this receive buffer is used up."""
        element = self._verbs.wr.SGE(self._base + buffer * BUFFER_BYTES, BUFFER_BYTES, self._region.lkey)
        request = self._verbs.wr.RecvWR(wr_id=_RECEIVES + buffer, num_sge=1, sg=[element])
        try:
            with verbs_errors():
                self._pair.post_recv(request)
        finally:
            request.close()
            element.close()

    def arm(self, *, messages_only: bool = False) -> None:
        """Make `descriptor` readable at the next completion, or only when a message arrives or something fails. Poll
        once more after it."""
        with verbs_errors():
            self._queue.req_notify(solicited_only=messages_only)

    def clear_events(self) -> None:
        """`descriptor` is not readable any more. Raises DeviceLost if there will be no more events."""
        while events := self._events.poll(0):
            if not events[0][1] & select.POLLIN:
                raise DeviceLost(DeviceLost.reason, hint=DeviceLost.next_step)
            with verbs_errors():
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)

    def close(self) -> None:
        """Tear it down: from now on the NIC refuses every key, and reads and writes nothing. Idempotent."""
        failures: list[str] = []
        while self._closers:  # one step after the other, whatever they raise
            try:
                with verbs_errors():
                    self._closers.pop()()
            except DeviceLost:
                continue  # and what it had with it
            except BufferError:
                continue  # somebody still looks at a message: the memory goes when they have
            except (QueuePairError, OSError) as error:
                failures.append(getattr(error, "message", str(error)))
        if failures:
            log.warning("queue_pair_not_torn_down", port=self._port.name, reason="; ".join(failures))


def _mask(enums: Any, names: str) -> int:  # noqa: ANN401 - pyverbs.enums
    """The attributes of a queue pair that are set, IBV_QP_... each."""
    return sum(getattr(enums, f"IBV_QP_{name}") for name in names.split())


def _nothing() -> None: ...
