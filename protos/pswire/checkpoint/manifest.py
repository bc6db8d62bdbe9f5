"""The manifest of a checkpoint: its parts, what they are of, and the job's state.

It is written last, so that a checkpoint is there if and only if its manifest is. What
is read may be any bytes, and is checked before it is used.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from xxhash import xxh3_128_hexdigest

from pswire.checkpoint.errors import (
    UNREADABLE,
    CheckpointError,
    DamagedError,
    FormatError,
)
from pswire.checkpoint.job_shape import check_job
from pswire.checkpoint.json_shape import (
    anything,
    fields,
    flag,
    number,
    one_of,
    optional,
    real,
    row,
    rows,
    text,
)
from pswire.clipping import is_clip_norm
from pswire.job_terms import JobTerms
from pswire.job_terms_codec import dump_terms, load_terms
from pswire.limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    SHARD_COUNT_MAX,
)
from pswire.membership import Mode
from pswire.names import name_problem, printable
from pswire.object_marks import ObjectMark
from pswire.placement import Placement, place
from pswire.schema import ElementType, EntryKind

FORMAT: Final = 1
"""Version of all files of a checkpoint; a newer one is refused by name."""

MANIFEST: Final = "manifest.json"

STATE: Final = "state.safetensors"
"""What a script has registered, where it has."""

MANIFEST_BYTES_MAX: Final = 256 << 20
"""Longest manifest that is read: four times the longest description of a model."""

_NAME: Final = re.compile(
    r"step-(?P<version>[0-9]{12,19})(-(?P<attempt>[1-9][0-9]{0,5}))?"
)
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_YEAR_10000_UNIX_S: Final = 253_402_300_800

_FILE: Final = row(text, number(), text)
_TERMS: Final = fields(
    {
        "schema": fields(
            {
                "entries": rows(
                    fields(
                        {
                            "model": text,
                            "name": text,
                            "shape": rows(number()),
                            "element_type": one_of(tuple(ElementType)),
                            "kind": one_of(tuple(EntryKind)),
                            "tied_names": rows(text),
                            "trainable": flag,
                        }
                    )
                ),
                "marks": rows(
                    fields(
                        {
                            **dict.fromkeys(ObjectMark.__slots__, text),
                            "named": flag,
                        }
                    )
                ),
            }
        ),
        "optimizers": rows(
            fields(
                {
                    "name": text,
                    "class_name": text,
                    "hyperparameter_names": rows(text),
                    "groups": rows(
                        fields(
                            {
                                "entry_indexes": rows(number()),
                                "hyperparameters": rows(real),
                            }
                        )
                    ),
                    "exchange_count": number(),
                    "loss_is_sum": flag,
                }
            )
        ),
        "clip_grad_norm": real,
        "compression": text,
        "privacy": optional(
            fields(
                {
                    "noise_multiplier": real,
                    "max_grad_norm": real,
                    "delta": real,
                    "epsilons": rows(real),
                }
            )
        ),
        "strategy": text,
    },
    added=["privacy", "strategy"],
)
_BODY: Final = fields(
    {
        "name": text,
        "job_id": text,
        "release": text,
        "created_unix_s": real,
        "version": number(),
        "clock": number(),
        "mode": text,
        "shard_count": number(1, SHARD_COUNT_MAX),
        "chunk_bytes": number(0, CHUNK_BYTES_MAX),
        "is_finite": flag,
        "parts": rows(_FILE),
        "state": rows(anything),
        "terms": _TERMS,
        "job": anything,
    }
)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Name of a checkpoint, in the order in which checkpoints are made.

    Attributes:
        version: Steps of all workers ever that are in its values.
        attempt: From 1, where earlier ones of the same version are there.
    """

    version: int
    attempt: int = 1

    def __str__(self) -> str:
        text = f"step-{self.version:012d}"
        return text if self.attempt == 1 else f"{text}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Reads a name; None where it is no checkpoint's."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        name = cls(int(found["version"]), int(found["attempt"] or 1))
        return name if str(name) == text else None

    @classmethod
    def checked(cls, text: str) -> Self:
        """Reads a name that somebody gives.

        Raises:
            CheckpointError: It is none. It is part of a path, so nothing else is taken.
        """
        name = cls.parse(text)
        if name is None:
            raise CheckpointError(
                f"{printable(text)[:64]!r} is no name of a checkpoint: they read "
                f"{cls(500)}, or {cls(500, 2)} where one of that version was there "
                "before; `psctl checkpoint list` shows them"
            )
        return name


def part_name(shard_index: int, shard_count: int) -> str:
    """Name of the file that a shard writes."""
    return f"part-{shard_index:05d}-of-{shard_count:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file of a checkpoint, as it was written.

    Attributes:
        name: Its name.
        byte_count: Its size.
        digest: XXH3-128 in hexadecimal: of a part's head, which has the digests of its
            tensors, and of all of what a script has registered.
    """

    name: str
    byte_count: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        name: Its name, as `CheckpointName` writes it.
        job_id: Job that it is of.
        release: Release that wrote it.
        created_unix_s: When, by the wall clock: for people, nothing is decided by it.
        version: Steps of all workers ever that are in its values.
        clock: Clock of the cut.
        mode: How workers kept together at the cut.
        shard_count: Shards of its placement, each of which wrote a part.
        chunk_bytes: Bytes of a full chunk, as `place` takes them; 0 for what suits.
        is_finite: Whether all parameters are finite.
        parts: Its parts, by shard.
        terms: What the job trains.
        job: The job's own state as JSON, which only the coordinator reads.
        state: What the script has registered, None for nothing.
    """

    name: str
    job_id: str
    release: str
    created_unix_s: float
    version: int
    clock: int
    mode: Mode
    shard_count: int
    chunk_bytes: int
    is_finite: bool
    parts: tuple[FilePart, ...]
    terms: JobTerms
    job: Mapping[str, Any]
    state: FilePart | None = None

    @property
    def byte_count(self) -> int:
        """Bytes of all parts."""
        return sum(part.byte_count for part in self.parts)

    @property
    def files(self) -> tuple[FilePart, ...]:
        """All of its files but the manifest."""
        return self.parts if self.state is None else (*self.parts, self.state)

    def placement(self) -> Placement:
        """Which chunks the parts have: those that the names of their tensors count."""
        return place(self.terms.schema, self.shard_count, self.chunk_bytes)

    def to_json(self) -> str:
        """One text for one value: whatever differs from it is damaged."""
        body = {
            "name": self.name,
            "job_id": self.job_id,
            "release": self.release,
            "created_unix_s": self.created_unix_s,
            "version": self.version,
            "clock": self.clock,
            "mode": self.mode.label,
            "shard_count": self.shard_count,
            "chunk_bytes": self.chunk_bytes,
            "is_finite": self.is_finite,
            "parts": [[part.name, part.byte_count, part.digest] for part in self.parts],
            "state": (
                []
                if self.state is None
                else [self.state.name, self.state.byte_count, self.state.digest]
            ),
            "terms": dump_terms(self.terms),
            "job": self.job,
        }
        return _sealed(FORMAT, body)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads a manifest.

        Raises:
            FormatError: A newer release wrote it.
            DamagedError: It is not as any release wrote it.
        """
        body = _opened(text)
        try:
            _BODY(body, "manifest")
            if body["state"]:
                _FILE(body["state"], "manifest.state")
            check_job(body["job"])
            manifest = cls(
                **{
                    **body,
                    "mode": Mode.labelled(body["mode"]),
                    "parts": tuple(FilePart(*part) for part in body["parts"]),
                    "state": FilePart(*body["state"]) if body["state"] else None,
                    "terms": load_terms(body["terms"]),
                }
            )
            problem = manifest._problem()
        except UNREADABLE as error:
            raise DamagedError(
                f"it is no manifest: {type(error).__name__}, "
                f"{printable(str(error))[:128]}"
            ) from error
        if problem:
            raise DamagedError(problem)
        return manifest

    def _problem(self) -> str:
        """What no release writes, in words; empty for what one may have written."""
        name = CheckpointName.parse(self.name)
        if name is None or name.version != self.version:
            return f"it is named {self.name[:64]!a}, and is of version {self.version}"
        if problem := name_problem(self.job_id):
            return f"its job {problem}"
        if not 0 <= self.created_unix_s < _YEAR_10000_UNIX_S:
            return "it does not say when it was written"
        if 0 < self.chunk_bytes < CHUNK_BYTES_MIN:
            return f"its chunks have {self.chunk_bytes} bytes"
        names = [
            part_name(index, self.shard_count) for index in range(self.shard_count)
        ]
        if [part.name for part in self.parts] != names:
            return f"it does not name one part for each of {self.shard_count} shards"
        if self.state is not None and self.state.name != STATE:
            return f"its registered state is no {STATE}"
        for part in self.files:
            if _DIGEST.fullmatch(part.digest) is None:
                return f"it says no digest of {part.name}"
        clip_grad_norm = self.terms.clip_grad_norm
        if clip_grad_norm and not is_clip_norm(clip_grad_norm):
            return f"it clips gradients to {clip_grad_norm}"
        self.terms.schema.validate()
        entry_count = len(self.terms.schema.entries)
        for spec in self.terms.optimizers:
            if any(not 0 <= index < entry_count for index in spec.entry_indexes):
                return f"optimizer {spec.name[:64]!a} has parameters that are not there"
        # Else a short file could name a model whose chunks alone would fill the memory.
        if self.byte_count < self.terms.byte_count:
            return (
                f"its parts have {self.byte_count} bytes, and its tensors "
                f"{self.terms.byte_count}"
            )
        return ""


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sealed(format_version: int, body: Mapping[str, Any]) -> str:
    digest = xxh3_128_hexdigest(_canonical(body).encode())
    whole = {"format": format_version, "manifest": body, "digest": digest}
    return _canonical(whole) + "\n"


def _opened(text: str | bytes) -> dict[str, Any]:
    """What is inside, if no byte of it has changed."""
    if not text:
        raise DamagedError("it is empty")
    try:
        whole = json.loads(text)
        found, body = whole["format"], whole["manifest"]
        # Beside the digest the text itself is compared, of which some bytes are in no
        # value, such as spaces.
        written = text.decode() if isinstance(text, bytes) else text
        is_whole = type(found) is int and written == _sealed(found, body)
    except UNREADABLE as error:
        raise DamagedError(
            f"it is no JSON of a manifest: {printable(str(error))[:128]}"
        ) from error
    if type(found) is int and found > FORMAT:
        raise FormatError(
            f"it has format {found}, and this release reads up to {FORMAT}: use the "
            "release that wrote it, or a newer one"
        )
    if not is_whole:
        raise DamagedError("its digest is not the one of its contents")
    body_found: dict[str, Any] = body
    return body_found
