import os
import socket

import pytest

from pswire.addresses import Address
from psworker.data.forked import close_connections, endpoints_of, start_function


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_copy_is_closed_and_the_connection_lives(
    family: socket.AddressFamily,
) -> None:
    host = "127.0.0.1"
    with socket.socket() as listener, socket.socket(family) as client:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        client.connect((host if family == socket.AF_INET else f"::ffff:{host}", port))
        with listener.accept()[0] as served:
            endpoints = endpoints_of([Address(host, port)])
            child = os.fork()
            if child == 0:
                os._exit(close_connections(endpoints))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
            client.sendall(b"alive")
            assert served.recv(5) == b"alive"


def test_other_connections_are_left_alone() -> None:
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.connect(listener.getsockname())
        with listener.accept()[0]:
            assert close_connections(endpoints_of([Address("127.0.0.1", 1)])) == 0
            assert client.fileno() >= 0


def test_the_users_own_start_function_is_called() -> None:
    seen: list[int] = []
    start_function([Address("no.such.host.invalid", 1)], seen.append)(3)
    assert seen == [3]
