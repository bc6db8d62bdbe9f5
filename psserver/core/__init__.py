"""The protocol as pure state machines.

Nothing here does I/O, reads a clock, starts a thread or knows gRPC or protobuf:
a core is fed with calls and `now_ms` and collects *effects*, which its owner takes
and carries out in order. The owner serialises calls. So thousands of schedules run
in one process, and a failing one is replayed from its seed.
"""
