"""One push per host: processes on one machine that are one worker of a job.

They reduce their gradients in shared memory, and one of them, the leader, is the member
of the job. `core` decides who leads and what is settled, and does no I/O. `rendezvous`
connects the processes, `group_driver` runs the core, `memory` adds and copies.
Source: docs/decisions/0010.
"""
