"""The worker's side of torch RPC, in a process that can be stopped between its turns.

Where both sides choose shared memory, torch RPC polls it: a core and more, though
nothing happens. Another contender would be measured on what is left.

Reads words from stdin and answers each with a line: `step` with its seconds, `values
FILE` when they are in the file.
"""

import os
import sys
import time

import torch
from torch.distributed import rpc

from psctl.bench import rpc_server


def main(port: str, transports: str, learning_rate: str, tensors_file: str) -> None:
    """Does what it is told until stdin ends.

    Args:
        port: Where both sides meet.
        transports: As those of the server.
        learning_rate: Of the server's SGD.
        tensors_file: First values and the gradient.
    """
    first, gradient = torch.load(tensors_file)
    rpc_server.join_rpc(
        rpc_server.WORKER_NAME, 1, int(port), rpc_server.Transports(transports)
    )
    server = rpc_server.SERVER_NAME
    rpc.rpc_sync(server, rpc_server.hold, args=(first, float(learning_rate)))
    held = first
    print(rpc.rpc_sync(server, os.getpid), flush=True)
    for line in sys.stdin:
        word, _, argument = line.rstrip("\n").partition(" ")
        if word == "step":
            began = time.perf_counter()
            held = rpc.rpc_sync(server, rpc_server.push_pull, args=(gradient,))
            print(time.perf_counter() - began, flush=True)
        else:
            torch.save(held, argument)
            print(word, flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
