"""What callers may make a daemon hold, and how long it waits for them: its settings."""

from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final

from pswire.limits import ELEMENT_COUNT_MAX, ENTRY_COUNT_MAX, MODEL_BYTES_MAX
from pswire.number_range import NumberRange
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema

_COUNT: Final = 1 << 20
_BYTES_MAX: Final = 16 * ELEMENT_COUNT_MAX
_SECONDS: Final = NumberRange(0.001, 24 * 3600.0, unit="seconds")


def _limit(default: float, allowed: NumberRange, help: str) -> Any:  # noqa: ANN401
    return field(default=default, metadata={"allowed": allowed, "help": help})


def _count(default: int, help: str, least: int = 1, most: int = _COUNT) -> Any:  # noqa: ANN401
    return _limit(default, NumberRange(least, most), help)


def _seconds(default: float, help: str) -> Any:  # noqa: ANN401
    return _limit(default, _SECONDS, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one daemon. Each fits a model of 3 GiB, or of 200,000 tensors.

    Their names on the command line have dashes, or underscores. An address counts as
    one machine; of IPv6 all of a /64 network do, which one machine has.
    """

    connections: int = _count(16_384, "Connections, where descriptors allow it.", 8)
    machine_connections: int = _count(8_192, "Connections of one machine.")
    connection_calls: int = _count(
        64, "Calls of one connection; further ones wait at the client.", 16, 1024
    )
    calls: int = _count(32_768, "Calls under way.", 16)
    machine_calls: int = _count(16_384, "Calls of one machine under way.", 16)
    metadata_bytes: int = _count(8_192, "Headers of a call.", 4_096)
    admin_connections: int = _count(
        64, "Connections to the admin port; idle ones end for others.", 4
    )
    tensors: int = _count(
        ENTRY_COUNT_MAX, "Tensors that a job may declare.", most=ENTRY_COUNT_MAX
    )
    model_bytes: int = _count(
        4 * ELEMENT_COUNT_MAX,
        "Bytes of all tensors that a job may declare.",
        most=_BYTES_MAX,
    )
    joins: int = _count(16, "Requests to join that are read at a time.")
    join_bytes: int = _count(
        2 * MODEL_BYTES_MAX,
        "Bytes of requests to join that are not whole, beside the first message of "
        "each.",
        most=_BYTES_MAX,
    )
    registrations: int = _count(
        1_024, "Workers that have registered, and have not begun to follow the job."
    )
    worker_answers: int = _count(
        4, "Answers to pulls, and as many to pushes, that one worker has not read."
    )
    snapshot_answers: int = _count(64, "Answers with snapshots under way.")
    machine_snapshot_answers: int = _count(16, "Of these, to one machine.")
    handshake_s: float = _seconds(10.0, "Until a connection speaks HTTP/2.")
    idle_s: float = _seconds(30.0, "For which a connection may be without a call.")
    first_message_s: float = _seconds(10.0, "Until a call sends its first message.")
    message_s: float = _seconds(
        30.0, "Between two messages of a call that brings something that is ready."
    )
    join_s: float = _seconds(30.0, "Until a request to join is whole.")
    step_s: float = _seconds(
        600.0, "Between two messages of a call whose worker computes in between."
    )
    unread_s: float = _seconds(
        600.0,
        "For which an answer may be unread. Then its connection ends, with all calls.",
    )
    reader_unread_s: float = _seconds(
        60.0, "The same of an answer with a snapshot, which others may wait for."
    )
    wait_s: float = _seconds(
        3_600.0, "For which a reader or tool may wait in one call."
    )
    free_memory_mib: int = _count(
        64, "Memory to be left below RLIMIT_AS and the control group's limit.", 0
    )

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Limits":
        """Reads `NAME=VALUE` texts; what is not named has its default.

        Raises:
            ValueError: There is no such limit, or the value is none.
        """
        known = {_name(each): each for each in fields(cls)}
        given: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition("=")
            name = name.replace("_", "-")
            if name not in known:
                raise ValueError(
                    f"{name[:64]!r} is no limit: give NAME=VALUE, where NAME is one of "
                    f"{', '.join(known)}"
                )
            try:
                number = known[name].metadata["allowed"].parsed(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            given[known[name].name] = number
        return cls(**given)  # type: ignore[arg-type]  # whole where they have to be

    def arguments(self) -> list[str]:
        """All of them, for the command line of another process.

        Those that have their defaults, too: it may inherit a variable that says else.
        """
        return [
            f"--limit={_name(each)}={getattr(self, each.name)}" for each in fields(self)
        ]

    def check_model(self, schema: ModelSchema) -> None:
        """Refuses what a job may not declare.

        Raises:
            Refusal: `LIMIT_EXCEEDED`.
        """
        if len(schema.entries) > self.tensors:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the model has {len(schema.entries)} tensors, the limit of this job "
                f"is {self.tensors} (tensors)",
            )
        byte_count = sum(entry.byte_count for entry in schema.entries)
        if byte_count > self.model_bytes:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the model declares {byte_count} bytes, the limit of this job is "
                f"{self.model_bytes} (model-bytes)",
            )

    @classmethod
    def rows(cls) -> list[tuple[str, str, str]]:
        """Name, default and meaning of each, for help and documentation."""
        return [
            (
                _name(each),
                f"{each.default:g}"
                if isinstance(each.default, float)
                else str(each.default),
                each.metadata["help"],
            )
            for each in fields(cls)
        ]


def _name(limit: "Field[Any]") -> str:
    return limit.name.replace("_", "-")


DEFAULT_LIMITS: Final = Limits()
