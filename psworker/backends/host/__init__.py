"""One push per host: processes on one machine that are one worker of a job.

They reduce their gradients in shared memory, and one of them, the leader, speaks to the
job. `core` decides who leads and what is settled, and does no I/O. `rendezvous` finds
the other processes, `group_driver` sends what the core says, `memory` adds and copies.
Source: docs/decisions/0010.
"""
