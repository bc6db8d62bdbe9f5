"""Who leads a host group, and what of its steps is settled.

Pure: no I/O, no threads, no clock of the machine; the owner feeds it events one by one
and does what `take_effects` returns, in order. Each process of a group has one.

A step goes: every member offers a part; the leader finds the group's place in the job;
each adds up its share of the gradients; the leader *seals* the step, and when every
member has the seal it pushes; then all copy the values. What holds:

- Nothing leaves the host before every member has the seal. So the next leader either
  has the seal, and sends the same bytes under the same number, or nothing was sent, and
  the members add up anew without the lost process.
- A leader that was stopped, and so excluded, can do no harm: for its next push it needs
  an answer of all members, and they have sent it `Excluded`.
- The memory that a seal is of is not written to before its step is over, also that of
  lost processes.

Invariants: `done.step` never decreases; a member's steps differ by one at most.
"""

from dataclasses import replace
from enum import Enum

from pswire.leased_data import DataRange
from psworker.backends.host.effects import (
    Arrive,
    Order,
    Push,
    Send,
)
from psworker.backends.host.leader_election import LeaderElection
from psworker.backends.host.messages import (
    Admit,
    Attempt,
    Bye,
    Done,
    Enter,
    Excluded,
    Failed,
    GroupStatus,
    Message,
    Offered,
    ProcessId,
    PushPlace,
    Reduce,
    Reduced,
    Seal,
    Sealed,
    State,
    StepPart,
    View,
)


class Phase(Enum):
    """What a leader waits for."""

    FOUNDING = "its way into the job"
    GATHERING = "what the others know"
    COLLECTING = "the parts of a step"
    ARRIVING = "its place in the job"
    REDUCING = "shares of the sum"
    SEALING = "all to have the seal"
    PUSHING = "the shards"


class HostCore(LeaderElection):
    """One process's state machine; attributes as `LeaderElection`."""

    def __init__(self, process: ProcessId, *, count: int, patience_ms: int) -> None:
        super().__init__(process, count=count, patience_ms=patience_ms)
        # Of the step after `done`: what this process brings, and its seal.
        self._part: StepPart | None = None
        self._seal: Seal | None = None
        # Of a leader.
        self._phase = Phase.FOUNDING
        self._offers: dict[ProcessId, tuple[int, StepPart]] = {}
        self._states: dict[ProcessId, State] = {}
        self._gathers_from = 0
        self._place: PushPlace | None = None
        self._attempt_count = 0
        self._attempt: Attempt | None = None
        self._square_sums: dict[ProcessId, float] = {}
        self._holders: set[ProcessId] = set()
        self._is_repeat = False
        self._is_parked = False
        # Data: what was dealt to this process, and, of a leader, to the others.
        self.hand: set[DataRange] = set()
        self.hands: dict[ProcessId, frozenset[DataRange]] = {}

    # Queries

    @property
    def sealed(self) -> Seal | None:
        """The step that is under way, if it is sealed."""
        return self._seal if self.is_settling else None

    @property
    def used(self) -> tuple[DataRange, ...]:
        """Data of the last step, and of earlier ones that may not be reported yet."""
        if self.done is None:
            return ()
        unreported = self.done.status.unreported
        parts = () if self.done.is_void else self.done.parts.values()
        return (
            *(each for part in parts for each in part.ranges),
            *unreported.consumed,
            *unreported.dropped,
        )

    def is_awaited_from(self, process: ProcessId) -> bool:
        """Of a leader, whether others have begun a step that waits for a process."""
        if not self.is_leader or self._phase is not Phase.COLLECTING:
            return False
        parts = self._parts()
        return bool(parts) and process not in parts

    @property
    def missing(self) -> tuple[ProcessId, ...]:
        """Of a leader, whom it waits for in its own group."""
        if not self.is_leader:
            return ()
        if self._phase is Phase.COLLECTING:
            return tuple(each for each in self.members if each not in self._parts())
        if self._phase is Phase.REDUCING:
            return tuple(e for e in self.members if e not in self._square_sums)
        return ()

    @property
    def is_gathering(self) -> bool:
        """Of a new leader, whether it does not know yet what all members know."""
        return self.is_leader and self._phase is Phase.GATHERING

    @property
    def is_settling(self) -> bool:
        """Whether the next call of a step ends an earlier one, that is sealed."""
        done = self.done
        return bool(done and self._seal is not None and self._seal.step > done.step)

    def counts(self, step: int) -> bool:
        """Of a process that was excluded: whether a step has its part all the same."""
        return (
            self._seal is not None
            and self._seal.step == step
            and self.process in self._seal.parts
        )

    @property
    def is_awaited(self) -> bool:
        """Of a leader, whether others have begun a step and it has not."""
        return self.is_awaited_from(self.process)

    # Messages

    def take(self, process: ProcessId, message: Message) -> None:
        """Handles a message of another process."""
        if isinstance(message, Seal) and process == self._leader:
            self._note_seal(message)  # also of one that is out: its part counts
        if self.is_out or process not in self._here:
            return
        match message:
            case Excluded():
                self._end()
            case Bye():
                self.lost(process)
            case View():
                self._take_view(process, message)
            case Enter(met=met):
                if self.is_leader and process not in (*self._entering, *self.members):
                    self._met[process] = met
                    self._entering.append(process)
                    self._admit()
            case Admit():
                self._take_admission(message)
            case State() | Offered() | Reduced() | Sealed():
                if self.is_leader:
                    self._take_answer(process, message)
            case Reduce() | Seal() | Done() | Failed():
                if self.view is not None and process == self.view.leader:
                    self._take_order(message)

    # Events of the user's thread

    def founded(self, status: GroupStatus) -> None:
        """The group is a member of the job, and this process holds the values."""
        self.done = Done(step=0, source=self.process, status=status, is_whole=True)
        self._phase = Phase.COLLECTING
        self._admit()

    def offer(self, part: StepPart) -> None:
        """The user steps: this process's part of the next step."""
        assert self.done is not None, "only members step"
        if self.is_settling:
            if self.is_leader and self._is_parked:
                self._is_parked, self._is_repeat = False, True
                self._push()
            return  # what is under way ends first
        self._part = part
        offered = Offered(self.done.step + 1, part)
        if self.is_leader:
            self._take_answer(self.process, offered)
        elif self.view is not None and self.view.leader in self._here:
            self._effects.append(Send(self.view.leader, offered))

    def arrived(self, place: PushPlace, status: GroupStatus) -> None:
        """The leader knows where the group stands, and holds the values."""
        assert self.done is not None, "only members step"
        if not self.is_leader or self._phase is not Phase.ARRIVING:
            return
        self._place = place
        self.done = replace(self.done, source=self.process, status=status)
        self._phase = Phase.COLLECTING
        self._admit()
        if len(self._parts()) == len(self.members):
            self._reduce()

    def reduced(self, attempt: Attempt, square_sum: float) -> None:
        """This process has added up its share."""
        answer = Reduced(attempt, square_sum)
        if self.is_leader:
            self._take_answer(self.process, answer)
        elif self.view is not None and self.view.leader in self._here:
            self._effects.append(Send(self.view.leader, answer))

    def pushed(self, done: Done) -> None:
        """The shards have answered, and this process holds the values."""
        if not self.is_leader:
            return  # excluded meanwhile
        self._finish(done)
        self._effects += [Send(e, done) for e in self.members if e != self.process]
        self._phase = Phase.COLLECTING
        self._admit()
        self._advance()

    def failed(self, failure: Failed) -> None:
        """The leader could not do what it was to do."""
        if not self.is_leader:
            return
        self._effects += [Send(process, failure) for process in sorted(self._here)]
        if self._phase is Phase.FOUNDING:
            self.leave()
        elif self._phase is Phase.PUSHING:
            self._is_parked = True
        else:
            self._phase = Phase.COLLECTING
            self._offers.clear()
            self._part = None

    # LeaderElection, of the step under way

    @property
    def _is_between_steps(self) -> bool:
        return self._phase is Phase.COLLECTING

    def _begin_to_lead(self) -> None:
        self._phase = Phase.FOUNDING
        self._offers.clear()
        self._states.clear()
        self._attempt_count = 0
        self.hands.clear()
        self._is_repeat = True  # of a seal that it finds
        self._is_parked = False

    def _gather(self) -> None:
        self._gathers_from = self.view.number if self.view is not None else 0
        self._phase = Phase.GATHERING
        self._take_state(self.process, self._state())

    def _state(self) -> State:
        assert self.view is not None, "only a view is answered"
        assert self.done is not None, "only members answer"
        return State(
            view=self.view.number,
            seal=self._seal,
            done=self.done,
            part=self._part,
            hand=frozenset(self.hand),
        )

    def _take_state(self, process: ProcessId, state: State) -> None:
        """Of a new leader: goes on once all members have sent their states."""
        assert self.done is not None, "a member has a last step"
        if self._phase is not Phase.GATHERING or state.view < self._gathers_from:
            return
        self._states[process] = state
        self.hands[process] = state.hand
        if state.part is not None:
            self._offers[process] = (state.done.step + 1, state.part)
        if not set(self.members) <= self._states.keys():
            return
        states = [self._states[each] for each in self.members]
        newest = max((each.done for each in states), key=lambda done: done.step)
        if newest.step > self.done.step:
            self._finish(newest)
        self._effects += [
            Send(each, newest)
            for each in self.members
            if each != self.process and self._states[each].done.step < newest.step
        ]
        seals = [each.seal for each in states if each.seal is not None]
        seal = max(seals, key=lambda each: each.step, default=None)
        self._phase = Phase.COLLECTING
        if seal is not None and seal.step > self.done.step:
            self._spread_seal(seal)
        else:
            self._advance()

    def _go_on_without(self, process: ProcessId) -> None:
        """Of a leader: a member is gone."""
        self._change_members(tuple(e for e in self.members if e != process))
        self._offers.pop(process, None)
        match self._phase:
            case Phase.GATHERING:
                self._take_state(self.process, self._states[self.process])
            case Phase.COLLECTING:
                self._admit()
                self._advance()
            case Phase.REDUCING:
                self._reduce()
            case Phase.SEALING:
                self._push_if_sealed()

    # A step, as the leader sees it

    def _take_answer(
        self, process: ProcessId, answer: State | Offered | Reduced | Sealed
    ) -> None:
        match answer:
            case State():
                self._take_state(process, answer)
            case Offered(step=step, part=part):
                self._offers[process] = (step, part)
                self._advance()
            case Reduced(attempt=attempt, square_sum=square_sum):
                if self._phase is Phase.REDUCING and attempt == self._attempt:
                    self._square_sums[process] = square_sum
                    self._seal_if_reduced()
            case Sealed(step=step):
                if self._seal is not None and step == self._seal.step:
                    self._holders.add(process)
                    self._push_if_sealed()

    def _parts(self) -> dict[ProcessId, StepPart]:
        """What members have brought to the step after the last one, by process id."""
        assert self.done is not None, "a leader of steps is in the job"
        wanted = self.done.step + 1
        offers = {process: self._offers.get(process) for process in self.members}
        return {
            process: offer[1]
            for process, offer in offers.items()
            if offer is not None and offer[0] == wanted
        }

    def _advance(self) -> None:
        if self._phase is not Phase.COLLECTING or self.done is None:
            return
        if len(self._parts()) == len(self.members):
            self._phase = Phase.ARRIVING
            self._effects.append(Order(Arrive(self.done.step + 1, self.done)))

    def _reduce(self) -> None:
        assert self.view is not None, "a leader has a view"
        assert self.done is not None, "a leader of steps is in the job"
        self._phase = Phase.REDUCING
        self._attempt_count += 1
        self._attempt = Attempt(
            self.done.step + 1, self.view.number, self._attempt_count
        )
        self._square_sums.clear()
        order = Reduce(attempt=self._attempt, parts=self._parts())
        self._effects += [Send(e, order) for e in self.members if e != self.process]
        self._effects.append(Order(order))

    def _seal_if_reduced(self) -> None:
        if set(self.members) <= self._square_sums.keys():
            assert self._place is not None, "found before"
            assert self.done is not None, "a leader of steps is in the job"
            self._is_repeat = False
            self._spread_seal(
                Seal(
                    step=self.done.step + 1,
                    place=self._place,
                    parts=self._parts(),
                    # In the order of process ids, so that it comes out the same.
                    square_sum=sum(self._square_sums[e] for e in self.members),
                )
            )

    def _spread_seal(self, seal: Seal) -> None:
        self._seal = seal
        self._phase = Phase.SEALING
        self._holders = {self.process}
        self._effects += [Send(e, seal) for e in self.members if e != self.process]
        self._push_if_sealed()

    def _push_if_sealed(self) -> None:
        if self._phase is Phase.SEALING and set(self.members) <= self._holders:
            self._phase = Phase.PUSHING
            self._push()

    def _push(self) -> None:
        assert self._seal is not None, "nothing else is pushed"
        assert self.done is not None, "a leader of steps is in the job"
        self._effects.append(Order(Push(self._seal, self.done, self._is_repeat)))

    # A step, as the others see it

    def _take_order(self, message: Reduce | Seal | Done | Failed) -> None:
        match message:
            case Failed():
                if not self.is_settling:
                    self._part = None
                self._effects.append(Order(message))
            case Reduce(attempt=attempt):
                if self.done is not None and attempt.step == self.done.step + 1:
                    self._effects.append(Order(message))
            case Seal(step=step):
                assert self.view is not None, "orders come from its leader"
                self._effects.append(Send(self.view.leader, Sealed(step)))
            case Done(step=step):
                if self.done is not None and step > self.done.step:
                    self._finish(message)

    def _note_seal(self, seal: Seal) -> None:
        if self.done is not None and seal.step > self.done.step:
            self._seal = seal

    def _finish(self, done: Done) -> None:
        before, self.done = self.done, done
        self.hand.difference_update(self.used)
        if before and before.status.rejoin_count < done.status.rejoin_count:
            self.hand.clear()  # what the start before held is not its own any more
        self._part = None
        self._effects.append(Order(done))
