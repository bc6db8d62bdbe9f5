"""Kills a process of the demo, and watches what comes of it."""

import time

from psctl.daemons import is_listening_line
from psctl.demo.kill import Kill, Role
from psctl.demo.progress import Progress, StepReport
from psctl.failures import CommandError
from psctl.processes import Children, Line
from psctl.stall import STALL_TIMEOUT_S
from pswire.addresses import Address
from pswire.exit_codes import ExitCode


class Killing:
    """One death in the demo.

    Attributes:
        kill: Which process dies when.
    """

    def __init__(self, kill: Kill, children: Children, coordinator: Address) -> None:
        self.kill = kill
        self._children = children
        self._coordinator = coordinator
        self._killed_s: float | None = None
        self._killed_clock = 0
        self._closed_s: float | None = None
        self._listened_s: float | None = None
        self._listened_clock = 0

    def look(self, progress: Progress) -> None:
        """Kills a daemon once the job has reached its step.

        Raises:
            CommandError: It was a shard, which ends the job.
        """
        if (
            self._killed_s is not None
            or self.kill.role is Role.WORKER
            or progress.clock < self.kill.step
        ):
            return
        self._note_death(progress)
        self._children.kill(self.kill.process_name)
        if self.kill.role is Role.SHARD:
            raise self._end_of_job()
        self._children.restart("coordinator", "--listen", str(self._coordinator))

    def take_line(self, line: Line, progress: Progress) -> None:
        """Notes what a child's line tells of the death."""
        if line.child != self.kill.process_name or self._listened_s is not None:
            return
        if self.kill.role is Role.WORKER and line.text is None:
            if self._children.was_killed(line.child):
                self._note_death(progress)
        elif self._killed_s is not None and is_listening_line(line.text):
            self._listened_s = time.monotonic()
            self._listened_clock = progress.frontier

    def take_report(self, report: StepReport) -> None:
        """Notes the first clock that closes after the death."""
        is_first = self._killed_s is not None and self._closed_s is None
        if is_first and report["frontier"] > self._killed_clock:
            self._closed_s = time.monotonic()

    def story(self, progress: Progress) -> str:
        """What came of it, for a person."""
        name = self.kill.process_name
        if self._killed_s is None:
            return (
                f"{name} was not killed: the training ended before step "
                f"{self.kill.step}; say a smaller step or more --epochs"
            )
        lines = [
            ("next clock closed", _since(self._killed_s, self._closed_s)),
        ]
        if self.kill.role is Role.WORKER:
            title = f"{name} was killed with SIGKILL in its step {self.kill.step}"
            heirs = [each for each in sorted(progress.clocks) if each != name]
            lines.append(("trained the rest", " and ".join(heirs)))
        else:
            title = f"the {name} was killed with SIGKILL at step {self.kill.step}"
            closed = self._listened_clock - self._killed_clock
            lines += [
                ("listened again", _since(self._killed_s, self._listened_s)),
                ("clocks closed without it", f"{closed}"),
                ("took over", "its next start, from the same --state-dir"),
            ]
        return "\n".join([title, *(f"    {key:<24}  {text}" for key, text in lines)])

    def _note_death(self, progress: Progress) -> None:
        self._killed_s = time.monotonic()
        self._killed_clock = progress.frontier

    def _end_of_job(self) -> CommandError:
        """Waits for the job to end without the shard; the failure that says so."""
        began_s = time.monotonic()
        name = self.kill.process_name
        if not self._children.wait_ended("coordinator", STALL_TIMEOUT_S):
            return CommandError(
                f"{name} was killed at step {self.kill.step}, and "
                f"{STALL_TIMEOUT_S:.0f} s later the job had not ended; this is a bug "
                "of paramserver",
                ExitCode.INTERNAL,
            )
        took_s = time.monotonic() - began_s
        said = self._children.log_tail("coordinator").splitlines()[-1]
        return CommandError(
            f"{name} was killed with SIGKILL at step {self.kill.step}.\n"
            "Its values are gone with it: in this release that ends the job, as it "
            f"did here\n{took_s:.1f} s later. The coordinator, which numbers shards as "
            f"they come, said:\n{said}",
            ExitCode.PEER_UNAVAILABLE,
        )


def _since(began_s: float, at_s: float | None) -> str:
    return "never" if at_s is None else f"{at_s - began_s:.2f} s later"
