"""A service that is known only after its server has bound its port.

A shard needs its port to register, and its identity to serve. Until then calls are
answered as those of an unknown method, which a client takes for a shard that is not
ready.
"""

from typing import Any

import grpc


class LateHandler(grpc.GenericRpcHandler):
    """Passes calls on to a handler that is set later."""

    def __init__(self) -> None:
        self._inner: grpc.GenericRpcHandler | None = None

    def set(self, inner: grpc.GenericRpcHandler) -> None:
        """From now on calls are served."""
        self._inner = inner

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The method's handler, None for an unknown method."""
        if self._inner is None:
            return None
        return self._inner.service(handler_call_details)
