"""A call that failed, without gRPC's types.

Any failure is one of two: *decided*, the server refused and nothing changed; or
*unknown*, and only asking shows what became of it.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar

import grpc
import grpc.aio

from pswire.error_details import is_decided, plain_details, refusal_from_rpc_error
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from pswire.security.credentials import Credentials
from psworker.errors import LimitError, PsError, UnavailableError, error_of_refusal

Call = TypeVar("Call", bound="grpc.aio.Call")

_HOPELESS_CODES: Final = frozenset(
    {"UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED"}
)
"""Codes that nothing but a change on one of the sides makes go away."""


class CallError(Exception):
    """A call that failed.

    Attributes:
        code: Name of the gRPC status code.
        refusal: The server's reason, `None` when gRPC made the status up.
        is_decided: Whether the server refused and nothing changed.
    """

    def __init__(
        self, peer: str, code: str, text: str, *, refusal: Refusal | None, decided: bool
    ) -> None:
        super().__init__(f"{peer}: {code}: {text}")
        self.peer = peer
        self.code = code
        self.text = text
        self.refusal = refusal
        self.is_decided = decided

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later without any change."""
        if self.refusal is not None:
            return CATALOGUE[self.refusal.reason].retryable
        if self._is_too_large:
            return False
        return not self.is_decided and self.code not in _HOPELESS_CODES

    @property
    def _is_too_large(self) -> bool:
        # gRPC's own refusal of a message, by either side; it has no code of its own.
        return self.code == "RESOURCE_EXHAUSTED" and "larger than max" in self.text

    def to_ps_error(self) -> PsError:
        """The exception that a user sees."""
        if self.refusal is not None:
            return error_of_refusal(self.refusal)
        if self._is_too_large:
            return LimitError(
                f"a message to or from {self.peer} is too large: {self.text}; what "
                "describes a model or an optimizer is smaller for fewer tensors, and "
                "anything else is a bug of paramserver: please report it"
            )
        return UnavailableError(
            f"{self.peer} gave no answer ({self.code.lower().replace('_', ' ')}: "
            f"{self.text}); look into its log"
        )


@contextmanager
def translated(peer: str) -> Iterator[None]:
    """Turns gRPC's errors, and answers that can't be read, into `CallError`."""
    began_s = time.monotonic()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        refused = refusal_from_rpc_error(error)
        if refused is not None and refused.reason is ErrorReason.UNAUTHENTICATED:
            token = Credentials.from_environment().token
            if token is not None and token.was_replaced(began_s):
                # Between the call and its refusal: the next call shows the new one.
                refused = Refusal(ErrorReason.CREDENTIAL_ENDED, refused.message)
        raise CallError(
            peer,
            error.code().name,
            plain_details(error.details() or ""),
            refusal=refused,
            decided=is_decided(error.code(), refused),
        ) from error
    except Refusal as refusal:
        # What came back can't be read: asking again would not change it.
        raise CallError(
            peer, "INTERNAL", refusal.message, refusal=refusal, decided=False
        ) from refusal
    except grpc.aio.UsageError as error:
        # The channel was closed below the call.
        raise CallError(
            peer, "CANCELLED", str(error), refusal=None, decided=False
        ) from error


@asynccontextmanager
async def calling(peer: str, start: Callable[[], Call]) -> AsyncIterator[Call]:
    """Starts a call, and cancels it when it is left early.

    So the server hears of it at once. Errors are as of `translated`, from the start on:
    a closed channel refuses there.
    """
    with translated(peer):
        call = start()
        try:
            yield call
        finally:
            call.cancel()
