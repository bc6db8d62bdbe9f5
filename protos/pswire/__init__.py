"""The contract between workers, shards and the coordinator."""

import os

# With a live stream, every fork (a DataLoader with workers) makes gRPC print
# "Other threads are currently calling into gRPC, skipping fork() handlers", which a
# user can do nothing about. gRPC reads this once, when it is first imported, so it is
# set here, before any module of ours imports it; a user's own setting stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# For the reason in `psworker/fork_guard.py`, also where a server shares the process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
