"""Who is in a host group and who leads it: entries, views, a new leader.

Pure; the part of `core` that knows nothing of what a step is.

A view says who leads and who is a member. Only leaders make views, each with a higher
number. When the leader is lost the first remaining member by process id makes the next
one, and gets the states of all others. A process enters between two steps, when it has
met all members: each has the other's memory then. Where two processes begin a group at
once, since neither knows the other yet, the one with the lower view gives way.
"""

from abc import ABC, abstractmethod
from dataclasses import replace

from psworker.backends.host.effects import (
    Drop,
    Effect,
    Found,
    Lead,
    Order,
    Send,
)
from psworker.backends.host.messages import (
    Admit,
    Bye,
    Done,
    Enter,
    Excluded,
    ProcessId,
    State,
    View,
)


class LeaderElection(ABC):
    """One process's part in who is in the group.

    Attributes:
        process: Which process.
        view: Newest one that it knows, `None` before there is any.
        done: The last step that is over for it, `None` while it is no member.
        is_out: Whether it has left, or was excluded.
    """

    def __init__(self, process: ProcessId, *, count: int, patience_ms: int) -> None:
        """Makes a process that has met no other yet.

        Args:
            process: Which process.
            count: Processes that the group waits for before it begins.
            patience_ms: How long it waits for them at most.
        """
        self.process = process
        self.view: View | None = None
        self.done: Done | None = None
        self.is_out = False
        self._count = count
        self._patience_ms = patience_ms
        self._entered_ms: int | None = None
        self._now_ms = 0
        self._here: set[ProcessId] = set()
        self._effects: list[Effect] = []
        self._views: dict[ProcessId, View] = {}  # by leader, while it is no member
        # Of a leader: who asks to enter, and whom each has met.
        self._entering: list[ProcessId] = []
        self._met: dict[ProcessId, frozenset[ProcessId]] = {}

    # The step under way

    @property
    @abstractmethod
    def _is_between_steps(self) -> bool:
        """Of a leader, whether a process may enter now."""

    @abstractmethod
    def _begin_to_lead(self) -> None:
        """This process leads from now on."""

    @abstractmethod
    def _gather(self) -> None:
        """Of a new leader: waits for what all members know of the step under way."""

    @abstractmethod
    def _go_on_without(self, process: ProcessId) -> None:
        """Of a leader: goes on after the loss of a member."""

    @abstractmethod
    def _state(self) -> State:
        """What this member knows, for a new leader."""

    # Members

    @property
    def is_member(self) -> bool:
        """Whether steps wait for this process."""
        return self.done is not None and not self.is_out

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job."""
        return (
            not self.is_out
            and self.view is not None
            and self.view.leader == self.process
        )

    @property
    def _leader(self) -> ProcessId | None:
        return self.view.leader if self.view is not None else None

    @property
    def members(self) -> tuple[ProcessId, ...]:
        """Whose parts a step waits for."""
        return self.view.members if self.view is not None else ()

    @property
    def others(self) -> frozenset[ProcessId]:
        """Processes that are connected to this one, members or not."""
        return frozenset(self._here)

    @property
    def watched(self) -> frozenset[ProcessId]:
        """Whose stop matters: of a leader all members', of others the leader's."""
        if self.view is None or self.is_out:
            return frozenset()
        if self.is_leader:
            return frozenset(self._here.intersection(self.members))
        expected = self._expected_leader()
        return frozenset(each for each in self._here if each == expected)

    def take_effects(self) -> list[Effect]:
        """What to do, in order; each once."""
        effects, self._effects = self._effects, []
        return effects

    def connected(self, process: ProcessId, view: View | None = None) -> None:
        """Another process is connected, and each has the other's memory.

        Args:
            process: Which.
            view: Newest one that it knows.
        """
        self._here.add(process)
        if view is not None and self.done is None:
            self._views[view.leader] = view

    def entered(self, now_ms: int) -> None:
        """This process has met all that were there."""
        self._entered_ms = self._now_ms = now_ms
        self._ask_or_found()

    def tick(self, now_ms: int) -> None:
        """Notes the time."""
        self._now_ms = now_ms
        if self._entered_ms is not None and self.view is None:
            self._ask_or_found()

    def lost(self, process: ProcessId) -> None:
        """Another process has ended, or was stopped for too long."""
        if process not in self._here or self.is_out:
            return
        self._here.discard(process)
        self._effects += [Send(process, Excluded()), Drop(process)]
        self._entering = [each for each in self._entering if each != process]
        if self.is_leader:
            if process in self.members:
                self._go_on_without(process)
        elif not self.is_member:
            self._ask_or_found()
        elif process in self.members and self._expected_leader() != self._leader:
            self._follow_leader()

    def leave(self) -> None:
        """This process leaves in good order."""
        if not self.is_out:
            self._effects += [Send(process, Bye()) for process in sorted(self._here)]
            self._effects += [Drop(process) for process in sorted(self._here)]
            self._here.clear()
            self.is_out = True

    def _ask_or_found(self) -> None:
        """Of a process that is no member: asks the leader, or becomes the first."""
        if self._entered_ms is None or self.is_member or self.is_out:
            return
        before, self.view = self.view, self._found_view()
        if self.view is not None:
            asked = before.leader if before is not None else None
            if self.view.leader in self._here and self.view.leader != asked:
                self._effects.append(Send(self.view.leader, Enter(self.others)))
            return
        is_patient = self._now_ms - self._entered_ms < self._patience_ms
        is_short = len(self._here) + 1 < self._count
        is_first = min({self.process, *self._here}) == self.process
        if is_first and not (is_short and is_patient):
            self._become_leader((self.process,))
            self._effects.append(Order(Found()))

    def _found_view(self) -> View | None:
        """Of a process that is no member: the newest view of any connected process."""
        led = [view for leader, view in self._views.items() if leader in self._here]
        if led:
            return max(led, key=lambda view: (view.number, view.leader))
        # After a lost leader another member will send a view of its own.
        views = [v for v in self._views.values() if self._here.intersection(v.members)]
        return max(views, key=lambda view: (view.number, view.leader), default=None)

    def _admit(self) -> None:
        """Admits those who ask, between two steps, when this process has the values."""
        if not self._entering or not self._is_between_steps:
            return
        if self.done is None or self.done.source != self.process:
            return
        new: list[ProcessId] = []
        for process in self._entering:
            if all(self._have_met(process, each) for each in (*self.members, *new)):
                new.append(process)
        if not new:
            return
        self._entering = [each for each in self._entering if each not in new]
        self._change_members((*self.members, *new))
        assert self.view is not None, "a leader has a view"
        admission = Admit(self.view, replace(self.done, is_whole=True))
        self._effects += [Send(process, admission) for process in new]

    def _have_met(self, process: ProcessId, other: ProcessId) -> bool:
        """Whether two processes have each other's memory; the later one has sent it."""
        return (
            other == self.process
            or other in self._met.get(process, ())
            or process in self._met.get(other, ())
        )

    def _take_admission(self, admission: Admit) -> None:
        if self.done is None:
            self.view, self.done = admission.view, admission.done
            self._effects.append(Order(admission))

    def _expected_leader(self) -> ProcessId | None:
        """The leader, or the next one if it is lost."""
        assert self.view is not None, "without a view nobody leads"
        alive = {*self._here, self.process}
        if self.view.leader in alive:
            return self.view.leader
        return min(alive.intersection(self.view.members), default=None)

    def _follow_leader(self) -> None:
        """The leader is lost: the next one by process id leads."""
        if self._expected_leader() == self.process:
            assert self.done is not None, "a member has a last step"
            alive = (*self._here.intersection(self.members), self.process)
            self._become_leader(alive)
            self._effects.append(Lead(self.done))
            self._gather()

    def _become_leader(self, members: tuple[ProcessId, ...]) -> None:
        self._entering.clear()
        self._begin_to_lead()
        number = self.view.number if self.view is not None and self.is_member else 0
        founder = self.view.founder if self.view and self.is_member else self.process
        self.view = View(number, self.process, members, founder)
        self._change_members(members)

    def _change_members(
        self, members: tuple[ProcessId, ...], *, number: int = 0
    ) -> None:
        assert self.view is not None, "a leader has a view"
        number = max(number, self.view.number) + 1
        founder = self.view.founder
        self.view = View(number, self.process, tuple(sorted(members)), founder)
        self._effects += [Send(process, self.view) for process in sorted(self._here)]

    def _is_older(self, view: View) -> bool:
        mine = self.view
        return mine is not None and (view.number, view.leader) <= (
            mine.number,
            mine.leader,
        )

    def _take_view(self, process: ProcessId, view: View) -> None:
        if self.is_member and self.view is not None:
            is_foreign = view.founder != self.view.founder
            if is_foreign and not self._is_older(view):
                self._end()
                return
        if process != view.leader:
            # Sent back by one that knows a later view, of a leader that was lost before
            # all had it.
            if self.is_leader and not self._is_older(view):
                self._change_members(self.members, number=view.number)
            return
        if not self.is_member:
            self._views[process] = view
            if not self.is_leader:
                self._ask_or_found()
            return
        if self._is_older(view):
            if self.view is not None and self.view.leader != process:
                # Of the same group: its leader was lost before all had its view.
                self._effects.append(Send(process, self.view))
            return
        before, self.view = self.view, view
        if self.process not in view.members:
            self._end()
            return
        left = set(before.members if before else ()).difference(view.members)
        for process in sorted(left.intersection(self._here)):
            self._here.discard(process)
            self._effects += [Send(process, Excluded()), Drop(process)]
        if before is None or before.leader != view.leader:
            self._effects.append(Send(view.leader, self._state()))

    def _end(self) -> None:
        """Notes that the group goes on without this process."""
        self.is_out = True
        self._effects += [Drop(process) for process in sorted(self._here)]
        self._here.clear()
        self._effects.append(Order(Excluded()))
