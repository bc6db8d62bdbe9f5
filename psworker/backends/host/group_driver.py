"""Runs a host group's state machine: feeds it with messages, and does what it says.

On the event loop, but for what the user's thread calls. So the group goes on, and its
leader's loss is noticed, while the script computes.
"""

import asyncio
import logging
import os
import queue
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Final

from pswire.object_marks import LOADER, MODEL, ObjectMark, order_difference
from pswire.shared_memory.segments import SegmentError
from psworker.backends.host.core import HostCore
from psworker.backends.host.effects import Drop, Lead, Order, Send, Task
from psworker.backends.host.leader_service import LeaderService
from psworker.backends.host.memory import HostMemory
from psworker.backends.host.messages import (
    Answer,
    Ask,
    Excluded,
    GiveBack,
    ProcessId,
    Question,
    View,
)
from psworker.backends.host.rendezvous import (
    UNPROVEN_TEXT,
    GroupSecret,
    Hello,
    Link,
    Rendezvous,
)
from psworker.errors import EvictedError, PsError
from psworker.event_loop import EventLoop, LoopFuture
from psworker.transport.values import Lease
from psworker.transport.waiting_log import WaitingLog

if TYPE_CHECKING:
    import socket

logger: Final = logging.getLogger("psworker")

LOOK_MS: Final = 250
"""How often a process looks whether those that it waits for are stopped."""

STOPPED_MS: Final = 750
"""How long one may be stopped. The coordinator evicts the group later: it misses a
stopped leader after about two seconds."""

FORM_LIMIT_MS: Final = 30_000
"""How long a new group waits for missing processes before it begins without them."""

BACK_LIMIT_MS: Final = 2_000
"""The same for a process that was in it before: the others are there, or done."""

_OUT_TEXT: Final = (
    "this process of a host's group is not part of it any more: it was stopped for "
    "too long, and the group went on without it"
)

_FOREIGN_MAX: Final = 16
"""Lines about processes that can't enter, of which a few are enough."""

_drivers: "weakref.WeakSet[GroupDriver]" = weakref.WeakSet()


class GroupDriver:
    """One process in its group.

    Attributes:
        core: The state machine. On the event loop; others read single facts of it.
    """

    def __init__(
        self,
        loop: EventLoop,
        core: HostCore,
        memory: HostMemory,
        *,
        digest: str,
        marks: tuple[ObjectMark, ...],
        on_lead: Callable[[Lead], LeaderService],
    ) -> None:
        """Makes a process that is in no group yet.

        Args:
            loop: Where sockets are.
            core: The state machine.
            memory: Maps the memory of others.
            digest: Of what was prepared.
            marks: By which models and loaders of processes are compared.
            on_lead: Called on the loop when this process becomes the leader; returns
                what answers the questions of the others.
        """
        self.core = core
        self._loop = loop
        self._memory = memory
        self._digest = digest
        self._marks = marks
        self._count = 0
        self._secret = GroupSecret("")
        self._foreign: set[str] = set()
        self._on_lead = on_lead
        self._links: dict[ProcessId, Link] = {}
        self._unknown: list[Link] = []
        self._closing: list[Link] = []
        self._stopped_since: dict[ProcessId, float] = {}
        self._orders: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._listener: socket.socket | None = None
        self._asyncio: Any = None
        self._timer: Any = None
        self._is_closed = False
        self._service: LeaderService | None = None
        self._asks: dict[int, tuple[Question, LoopFuture[Any]]] = {}
        self._asked: ProcessId | None = None
        self._ask_count = 0
        self._answering: dict[tuple[ProcessId, int], asyncio.Task[None]] = {}
        _drivers.add(self)

    # The user's thread

    def enter(self, group: str, count: int) -> None:
        """Connects to all processes that are there.

        Raises:
            ConfigurationError: They have prepared something else.
            StartTimeoutError: Another process has not finished entering.
        """
        rendezvous = Rendezvous(group, self.core.process.number)
        self._listener = rendezvous.listener
        try:
            self._count, self._secret = count, GroupSecret(group)
            own, descriptor = self._hello(), self._memory.segment.descriptor
            met = rendezvous.meet(own, descriptor, count, self._secret)
            self._loop.run(lambda: self._begin(met))
        finally:
            rendezvous.close()

    def post(self, event: Callable[[HostCore], None]) -> None:
        """Has the state machine handle an event, soon."""
        self._loop.post(lambda: self._act(event))

    def ask(self, question: Question) -> "LoopFuture[Any]":
        """Asks the leader, the next one too if it is lost. Can be cancelled.

        The future raises `EvictedError` when the group goes on without this process.
        """
        future: LoopFuture[Any] = LoopFuture(
            lambda: self._loop.post(lambda: self._withdraw(future))
        )
        self._loop.post(lambda: self._begin_asking(question, future))
        return future

    def serve(self, service: LeaderService) -> None:
        """Answers the questions of all from now on, as the leader."""

        def begin() -> None:
            self._service = service

        self._loop.post(begin)

    def settle(self) -> bool:
        """Handles all messages that are there; whether this process is a member."""

        async def look() -> bool:
            self._act(lambda _: None)
            return not self.core.is_out

        return self._loop.run(look)

    def next_task(self, deadline: float, log: WaitingLog) -> Task | None:
        """What to do next; waits for it, `None` if there is nothing in time."""
        while True:
            try:
                left = min(log.quiet_s, deadline - time.monotonic())
                return self._orders.get(timeout=max(0.01, left))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                log.remind(self.waited_for())

    def pending_task(self) -> Task | None:
        """What to do since the script was last in a call, one at a time."""
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def waited_for(self) -> str:
        """Whom this process waits for, in words."""
        core = self.core
        if core.view is None:
            return "the processes of this host's group that are not here yet"
        missing = core.missing
        if missing:
            names = ", ".join(str(process.number) for process in missing)
            return f"process {names} of this host's group"
        if core.is_leader:
            return "the shards"
        return f"process {core.view.leader.number}, which leads this host's group"

    def close(self) -> None:
        """Leaves the group, if it is in it, and ends all sockets."""

        async def end() -> None:
            self._act(HostCore.leave)
            self._end()

        if not self._is_closed:
            self._loop.run(end)

    # The event loop

    async def _begin(self, met: list[tuple[Link, Hello]]) -> None:
        self._asyncio = asyncio.get_running_loop()
        assert self._listener is not None, "it listens"
        self._asyncio.add_reader(self._listener, self._accept)
        for link, hello in met:
            self._connect(link, hello)
        self._act(lambda core: core.entered(_now_ms()))
        self._look()

    def _connect(self, link: Link, hello: Hello) -> None:
        self._memory.adopt(hello.process, hello.header, link.descriptors.popleft())
        self._links[hello.process] = link
        self.core.connected(hello.process, hello.view)
        self._asyncio.add_reader(link.socket, self._act, _nothing)

    def _accept(self) -> None:
        assert self._listener is not None, "it listens"
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # closed before it was accepted
        try:
            link = Link(peer)
        except SegmentError as error:
            # Any user of the machine may connect, as often as they like.
            if len(self._foreign) < _FOREIGN_MAX and str(error) not in self._foreign:
                self._foreign.add(str(error))
                logger.warning("a process can't enter this host's group: %s", error)
            peer.close()
            return
        self._unknown.append(link)
        self._asyncio.add_reader(peer, self._receive_hello, link)

    def _receive_hello(self, link: Link) -> None:
        """Handles the first message of a process that enters."""
        for hello in link.receive():
            self._asyncio.remove_reader(link.socket)
            self._unknown.remove(link)
            if refusal := self._refusal(hello):
                link.send(refusal)
                self._finish(link)
                return
            own = self._hello(self.core.view)
            link.send(own, self._memory.segment.descriptor)
            self._connect(link, hello)
            self._act(_nothing)
            return
        if link.is_over:
            self._asyncio.remove_reader(link.socket)
            self._unknown.remove(link)
            link.close()

    def _hello(self, view: View | None = None) -> Hello:
        return Hello(
            self.core.process,
            self._digest,
            self._count,
            self._memory.segment.header,
            view,
            self._marks,
            self._secret.proof_of(self.core.process),
        )

    def _refusal(self, hello: object) -> str:
        """Why a process may not enter; empty if it may."""
        if isinstance(hello, Hello) and not self._secret.admits(hello):
            return f"it {UNPROVEN_TEXT}"
        if not isinstance(hello, Hello) or hello.digest != self._digest:
            return (
                "it has prepared other models, optimizers, loaders or options, or has "
                "registered modules in another order (as from a set: fill them from "
                "sorted(...)); all processes of a host's group run the same script"
            )
        for kind in (MODEL, LOADER):
            lines = order_difference(self._marks, hello.marks, kind)
            if lines:
                return (
                    f"it gives its {kind}s in another order ({'; '.join(lines)}); name "
                    "them, as in ps.prepare(generator=G, discriminator=D, ...)"
                )
        if hello.count != self._count:
            return (
                f"its PS_LOCAL_SIZE says {hello.count} processes, that of the others "
                f"{self._count}; give all of them the same PS_LOCAL_SIZE, "
                "and each group of a job on this machine another PS_HOST_GROUP"
            )
        return ""

    def _act(self, event: Callable[[HostCore], None]) -> None:
        """Handles what others have sent, exclusions first, then an event."""
        if self._is_closed:
            return
        received: list[tuple[ProcessId, Any]] = []
        over: list[ProcessId] = []
        for process, link in list(self._links.items()):
            received += [(process, message) for message in link.receive()]
            if link.is_over:
                over.append(process)
        received.sort(key=lambda each: not isinstance(each[1], Excluded))
        for process, message in received:
            match message:
                case Ask():
                    self._take_ask(process, message)
                case Answer():
                    self._take_answer(message)
                case _:
                    self.core.take(process, message)
        for process in over:
            self.core.lost(process)
        event(self.core)
        self._carry_out()
        for process in over:
            if process in self._links:
                self._drop(process)
        self._follow()

    # Questions to the leader

    def _begin_asking(self, question: Question, future: "LoopFuture[Any]") -> None:
        self._ask_count += 1
        number = self._ask_count
        self._asks[number] = question, future
        self._act(_nothing)  # asks whoever leads
        self._send_ask(number)

    def _withdraw(self, future: LoopFuture[Any]) -> None:
        for number, (_, asked) in list(self._asks.items()):
            if asked is future:
                del self._asks[number]
                self._send(self._asked, Ask(number, None))
        future.set_exception(CancelledError())

    def _follow(self) -> None:
        """Sends open questions to a new leader."""
        core = self.core
        if self._service is not None and core.is_leader:
            self._service.note_change()
        leader = core.view.leader if core.view is not None and core.is_member else None
        if core.is_out:
            for _, future in self._asks.values():
                future.set_exception(EvictedError(_OUT_TEXT))
            self._asks.clear()
        elif leader != self._asked:
            self._asked = leader
            for number in list(self._asks):
                self._send_ask(number)

    def _send_ask(self, number: int) -> None:
        if number in self._asks:
            self._send(self._asked, Ask(number, self._asks[number][0]))

    def _send(self, process: ProcessId | None, message: Ask | Answer) -> None:
        if process == self.core.process:
            if isinstance(message, Ask):
                self._take_ask(self.core.process, message)
            else:
                self._take_answer(message)
        elif process in self._links:
            self._links[process].send(message)
            self._flush_later(self._links[process])

    def _take_ask(self, process: ProcessId, ask: Ask) -> None:
        key = process, ask.number
        under_way = self._answering.get(key)
        if ask.question is None:
            if under_way is not None:
                under_way.cancel()
        elif under_way is None and self._service is not None:
            task = self._asyncio.create_task(self._reply(self._service, process, ask))
            self._answering[key] = task
            task.add_done_callback(lambda _: self._answering.pop(key, None))

    async def _reply(
        self, service: LeaderService, process: ProcessId, ask: Ask
    ) -> None:
        assert ask.question is not None, "there is something to answer"
        result = await service.answer(process, ask.question)
        self._send(process, Answer(ask.number, result))

    def _take_answer(self, answer: Answer) -> None:
        asked = self._asks.pop(answer.number, None)
        leased = answer.result.ranges if isinstance(answer.result, Lease) else ()
        if asked is None:
            if leased:  # the question was cancelled
                self._begin_asking(GiveBack(leased), LoopFuture())
            return
        self.core.hand.update(leased)
        try:
            asked[1].set_result(answer.value())
        except PsError as error:
            asked[1].set_exception(error)

    # Effects

    def _carry_out(self) -> None:
        for effect in self.core.take_effects():
            match effect:
                case Order(task=task):
                    self._orders.put(task)
                case Send(process=process, message=message):
                    link = self._links.get(process)
                    if link is not None:
                        link.send(message)
                        self._flush_later(link)
                case Drop(process=process):
                    if process in self._links:
                        self._drop(process)
                case Lead():
                    self._service = self._on_lead(effect)

    def _flush_later(self, link: Link) -> None:
        if link.has_unsent:
            self._asyncio.add_writer(link.socket, self._flush, link)

    def _flush(self, link: Link) -> None:
        link.flush()
        if not link.has_unsent:
            self._asyncio.remove_writer(link.socket)
            if link in self._closing:
                self._closing.remove(link)
                link.close()

    def _drop(self, process: ProcessId) -> None:
        link = self._links.pop(process)
        self._stopped_since.pop(process, None)
        self._asyncio.remove_reader(link.socket)
        self._finish(link)

    def _finish(self, link: Link) -> None:
        """Closes a link once all is sent."""
        link.flush()
        if link.has_unsent:
            self._closing.append(link)
            self._flush_later(link)
        else:
            self._asyncio.remove_writer(link.socket)
            link.close()

    def _look(self) -> None:
        """Notices processes that are waited for and stopped."""
        self._timer = self._asyncio.call_later(LOOK_MS / 1000, self._look)
        self._act(_nothing)  # messages first
        now = time.monotonic()
        for process in sorted(self.core.watched):
            link = self._links.get(process)
            if link is None or not link.is_stopped():
                self._stopped_since.pop(process, None)
            elif (
                now - self._stopped_since.setdefault(process, now) >= STOPPED_MS / 1000
            ):
                logger.warning(
                    "process %d of this host's group (PID %d) is stopped: the group "
                    "goes on without it",
                    process.number,
                    link.pid,
                )
                self.core.lost(process)
        self._act(lambda core: core.tick(_now_ms()))

    def _end(self) -> None:
        self._is_closed = True
        self._follow()
        for task in list(self._answering.values()):
            task.cancel()
        if self._listener is not None:
            if self._asyncio is not None:
                self._asyncio.remove_reader(self._listener)
            self._listener.close()
        if self._asyncio is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        for process in list(self._links):
            self._drop(process)
        for link in (*self._closing, *self._unknown):
            self._asyncio.remove_reader(link.socket)
            self._asyncio.remove_writer(link.socket)
            link.close()

    def close_inherited(self) -> None:
        """In a forked child: closes copies by which its parent would seem alive."""
        links = (*self._links.values(), *self._unknown, *self._closing)
        for descriptor in (*(each.socket for each in links), self._listener):
            if descriptor is not None:
                descriptor.close()


def _close_inherited() -> None:
    for driver in _drivers:
        driver.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)


def _nothing(_: HostCore) -> None:
    """For `_act` without an event."""


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
