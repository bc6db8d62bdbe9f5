"""Opens calls of a shard and reads one message of each: `python unread_calls.py`.

Arguments: the shard's address, then for each call the name of its method and its
request in hexadecimal. Prints a line for each call once its first message is there,
and then waits to be killed.
"""

import signal
import sys

import grpc

from pswire.limits import MESSAGE_BYTES_MAX


def main(address: str, *calls: str) -> None:
    options = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    kept = []
    for method, request in zip(calls[::2], calls[1::2], strict=True):
        # Each on a connection of its own, as several readers would be.
        channel = grpc.insecure_channel(address, options=options)
        call: grpc.StreamStreamMultiCallable[bytes, bytes]
        # On the wire a call of one request is a stream of one message.
        call = channel.stream_stream(f"/pswire.v1.ParameterService/{method}")
        answers = call(iter((bytes.fromhex(request),)))
        size = len(next(answers))
        kept.append((channel, answers))
        print(f"{method} {size}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
