"""A channel whose calls prove who this process is."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from typing_extensions import override

from pswire.security.certificates import Certificates, Pem
from pswire.security.credentials import TokenSource


class ProvenChannel(grpc.aio.Channel):
    """Calls that show a token, on a channel with the certificates in force.

    gRPC reads certificates when it makes a channel and never again, so that one whose
    connection breaks after their end could not connect any more. Here the first call
    after a renewal opens a new channel. Calls that are open stay where they are, and
    the former channel is closed when the last of them has ended. The token goes with
    each call as metadata: gRPC's own credentials of calls need TLS, and a thread.
    """

    def __init__(
        self,
        certificates: Certificates | None,
        token: TokenSource | None,
        open_channel: Callable[[Pem | None], grpc.aio.Channel],
    ) -> None:
        """Opens a channel.

        Args:
            certificates: Of this process, None for calls without TLS.
            token: Of this process, None for calls without one.
            open_channel: Opens a channel with certificates, or without.
        """
        self._certificates = certificates
        self._token = token
        self._open_channel = open_channel
        self._pem = None if certificates is None else certificates.current()
        self._channel = open_channel(self._pem)
        self._makers: dict[object, Callable[..., grpc.aio.Call]] = {}
        """Of calls on the newest channel, by method."""
        self._open_counts = {self._channel: 0}
        """Calls that are open, by channel."""
        self._is_closed = False

    @override
    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._callable("unary_unary", method, options)

    @override
    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._callable("unary_stream", method, options)

    @override
    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._callable("stream_unary", method, options)

    @override
    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._callable("stream_stream", method, options)

    @override
    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        for each in list(self._open_counts):
            await each.close(grace)

    @override
    async def __aenter__(self) -> "ProvenChannel":
        return self

    @override
    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @override
    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    @override
    async def wait_for_state_change(
        self, last_observed_state: grpc.ChannelConnectivity
    ) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    @override
    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def _callable(
        self, kind: str, method: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[..., grpc.aio.Call]:
        """What makes calls of one method, each on the channel that is the newest."""
        key = object()

        def call(
            *request: Any,  # noqa: ANN401, as grpc's
            **arguments: Any,  # noqa: ANN401, as grpc's
        ) -> grpc.aio.Call:
            channel = self._newest()
            maker = self._makers.get(key)
            if maker is None:
                maker = getattr(channel, kind)(*method, **options)
                self._makers[key] = maker
            if self._token is not None:
                arguments["metadata"] = self._token.metadata()
            made = maker(*request, **arguments)
            if self._certificates is None:
                return made  # there is one channel, for ever
            self._open_counts[channel] += 1
            made.add_done_callback(lambda _: self._note_ended(channel))
            return made

        return call

    def _newest(self) -> grpc.aio.Channel:
        if self._certificates is None:
            return self._channel
        pem = self._certificates.current()
        if pem is not self._pem and not self._is_closed:
            former = self._channel
            self._channel = self._open_channel(pem)
            self._pem = pem
            self._makers.clear()
            self._open_counts[self._channel] = 0
            self._forget_unused(former)
        return self._channel

    def _note_ended(self, channel: grpc.aio.Channel) -> None:
        self._open_counts[channel] -= 1
        if channel is not self._channel:
            self._forget_unused(channel)

    def _forget_unused(self, channel: grpc.aio.Channel) -> None:
        """A channel that nobody has any more is closed by gRPC."""
        if self._open_counts[channel] == 0:
            del self._open_counts[channel]
