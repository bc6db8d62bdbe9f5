"""Snapshots of a job, for processes that evaluate, serve or keep them.

A reader is no member of the job, which never waits for it.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from pswire.frames import ChunkFrame
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import INNER_STATE_MODEL
from psworker import event_loop
from psworker.config import (
    TIMEOUT_S,
    check_credentials,
    find_coordinator,
    settings,
)
from psworker.errors import (
    ClosedError,
    ConfigurationError,
    SplitError,
    WaitTimeoutError,
    error_of_refusal,
)
from psworker.launch.reachability import (
    problem_behind_call,
    unreachable,
    wait_reachable,
)
from psworker.left_behind import reduced
from psworker.snapshots.snapshot_image import SnapshotImage
from psworker.snapshots.snapshot_path import refusal_text, written_whole
from psworker.tracebacks import at_entrance
from psworker.transport.calls import CallError, all_or_none, left_s, now, pause
from psworker.transport.control_client import ControlClient
from psworker.transport.ports import CoordinatorPort
from psworker.transport.snapshot_client import SnapshotClient
from psworker.transport.waiting_log import WaitingLog

if TYPE_CHECKING:
    import torch

    from pswire.checkpoint.manifest import Manifest
    from pswire.leased_data import RecordedSplit
    from pswire.schema import ModelSchema
    from psworker.data.split_value import Split
    from psworker.transport import values

T = TypeVar("T")

Progress = Callable[[int, int], object]
"""Called with how many bytes have come, and how many there are in all."""

_ANSWER_MARGIN_S: Final = 5.0
"""What a call may take longer than the wait it asks for, before we stop believing in
an answer."""

CONNECT_TIMEOUT_S: Final = 8.0
"""Longest wait for a coordinator that may be just starting."""

_RESTART_TIMEOUT_S: Final = 8.0
"""How long a process that has answered before may be away: it may be restarting, or its
connections were lost."""

_RETRY_INTERVAL_S: Final = 0.2
"""Between two questions to a job that has not started."""

_NEWEST: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The parameters of one version, the same one on all shards.

    Attributes:
        version: Steps of all workers ever that are in it.
        clock: Clock of the cut.
        generation: Generation of the job at the cut.
        job_id: Job it is of.
        byte_count: Bytes of all values.
        received_byte_count: Bytes of values that were sent for it: fewer where another
            snapshot had some of them, more where some were sent again.
    """

    version: int
    clock: int
    generation: int
    job_id: str
    byte_count: int
    received_byte_count: int = 0
    _states: Mapping[str, "OrderedDict[str, torch.Tensor]"]

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models of the job."""
        return tuple(self._states)

    def state_dict(self, model: str | None = None) -> "OrderedDict[str, torch.Tensor]":
        """Values by name, as the plain model's `load_state_dict` takes them.

        Tied parameters are there under each of their names. The tensors are on the
        CPU and belong to the snapshot: a model that loads them copies them.

        Args:
            model: Which one, where the job has several.

        Raises:
            ConfigurationError: The job has several and none is named, or another.
        """
        return state_of(self._states, model)

    @at_entrance
    def save(self, path: str | os.PathLike[str], model: str | None = None) -> None:
        """Writes a safetensors file that loads into the plain model.

        The file appears whole or not at all. Its metadata holds version, clock,
        generation and job.

        Args:
            path: Where to; a file that is there is replaced.
            model: Which model, where the job has several.

        Raises:
            ConfigurationError: As `state_dict`; or the path is no file's, or ends as
                those of another format do, such as `.pt`.
            OSError: It can't be written.
        """
        target = Path(path)
        if text := refusal_text(target):
            raise ConfigurationError(text)
        from psworker.snapshots.huggingface import write_file

        tensors = self.state_dict(model)
        metadata = {
            **metadata_of(self),
            "paramserver.generation": str(self.generation),
        }
        with written_whole(target) as partial, partial.open("wb") as file:
            # Under each of its names: a plain model has no list of ties.
            write_file(file, tensors, lambda name: (tensors[name],), metadata)


def metadata_of(values: "Snapshot | Manifest") -> dict[str, str]:
    """What a safetensors file says of values beside the tensors."""
    return {
        "format": "pt",
        "paramserver.job": values.job_id,
        "paramserver.version": str(values.version),
        "paramserver.clock": str(values.clock),
    }


class SnapshotReader:
    """Pulls snapshots from a job. Safe to use from several threads.

    Example::

        with psworker.SnapshotReader("127.0.0.1:7000") as reader:
            snapshot = reader.latest()
            model.load_state_dict(snapshot.state_dict())
            newer = reader.wait_newer(snapshot.version, timeout=30)
    """

    @at_entrance
    def __init__(self, address: str | None = None) -> None:
        """Names the coordinator; it is called first when something is asked of it.

        Args:
            address: `HOST:PORT`; `PS_COORDINATOR` when left out.

        Raises:
            ConfigurationError: There is no address, or it is none, or the files of TLS
                can't be used.
        """
        self._address = find_coordinator(address, settings())
        check_credentials()
        self._loop = event_loop.acquire()
        self._lock = threading.RLock()  # a signal handler may read too
        self._is_closed = False
        self._has_answered = False
        # Both are used on the event loop only.
        self._control: CoordinatorPort | None = None
        self._shards: dict[tuple[str, int], SnapshotClient] = {}

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refused: its connections are of this process."""
        return reduced(
            f"the snapshot reader of {self._address}",
            "its connections are of this process; open another one",
        )

    @at_entrance
    def latest(
        self,
        timeout: float = 60.0,
        *,
        since: Snapshot | None = None,
        restart: bool = True,
        progress: Progress | None = None,
    ) -> Snapshot:
        """The newest snapshot, cut now if need be.

        A download that is interrupted goes on with what lacks.

        Args:
            timeout: Longest wait, in seconds, for the job to have one.
            since: One from before: only what has changed is sent. The two share no
                memory.
            restart: Whether to begin again with the newest one, once, when shards keep
                this one no more before all of it has come, or are away for long.
            progress: Called with how many bytes have come, and how many there are, from
                the thread of the event loop: it must return at once.

        Raises:
            WaitTimeoutError: There was none in time; the text names who is missing.
            ConnectError: No coordinator was reached.
            SnapshotError: No snapshot could be read; `SnapshotGoneError` where shards
                keep it no more.
            CorruptionError: Twice a tensor was not what its shard has.
        """
        return self._read(_NEWEST, timeout, since, restart, progress)

    @at_entrance
    def wait_newer(
        self,
        version: int,
        timeout: float = 60.0,
        *,
        since: Snapshot | None = None,
        restart: bool = True,
        progress: Progress | None = None,
    ) -> Snapshot:
        """Waits for a snapshot above a version, and returns it.

        Args:
            version: The version that the caller has.
            timeout: Longest wait for a newer one, in seconds.
            since: As for `latest`.
            restart: As for `latest`.
            progress: As for `latest`.

        Raises:
            WaitTimeoutError: There was none in time.
            JobEndedError: There will be none.
            ConnectError: No coordinator was reached.
            SnapshotError: As for `latest`.
            CorruptionError: As for `latest`.
        """
        if version < 0:
            raise ConfigurationError(f"a version is at least 0, not {version}")
        return self._read(version, timeout, since, restart, progress)

    def close(self) -> None:
        """Ends the connections. What was read stays usable."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._loop.run(self._close_clients)
        finally:
            event_loop.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @at_entrance
    def split(
        self,
        name: str,
        data: object,
        *,
        labels: object = None,
        groups: object = None,
        times: object = None,
        timeout: float = 60.0,
    ) -> "Split":
        """The split that the job's workers have recorded, drawn again from the data.

        Args:
            name: Its name in the job.
            data: What was split, or its number of samples.
            labels: As the workers gave them to `psworker.data.split`.
            groups: Likewise.
            times: Likewise.
            timeout: Longest wait for the coordinator, in seconds.

        Raises:
            SplitError: None of that name is recorded, or the data gives another one.
            ConnectError: No coordinator was reached.
        """
        from psworker.data.splitting import read_back

        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{name!r} is no name of a split; give a string")

        async def ask() -> "tuple[RecordedSplit, ...]":
            return await self._coordinator().list_splits(name, timeout_s=timeout)

        found = self._ask(ask, timeout)
        if not found:
            raise SplitError(
                f"the job has no split {name!r}; it has {self._split_names(timeout)}: "
                "let a worker record it with ps.record_split(name, split)"
            )
        return read_back(found[0], data, labels=labels, groups=groups, times=times)

    def _split_names(self, timeout_s: float) -> str:
        async def ask() -> "tuple[RecordedSplit, ...]":
            return await self._coordinator().list_splits(timeout_s=timeout_s)

        names = [repr(each.name) for each in self._ask(ask, timeout_s)]
        return ", ".join(names) or "none"

    def _read(
        self,
        newer_than: int,
        timeout_s: float,
        since: Snapshot | None,
        restart: bool,
        progress: Progress | None,
    ) -> Snapshot:
        if since is not None and not isinstance(since, Snapshot):
            raise ConfigurationError(
                f"since: a Snapshot that was read before, not {type(since).__name__}"
            )

        async def pull() -> Snapshot:
            found = await self._request(newer_than, timeout_s)
            try:
                return await self._pull(found, since, progress)
            except CallError as error:
                if not restart or not (
                    _reason_of(error) is ErrorReason.SNAPSHOT_GONE or _is_away(error)
                ):
                    raise
            found = await self._request(newer_than, timeout_s)
            return await self._pull(found, since, progress)

        return self._ask(pull, timeout_s)

    def _ask(self, work: "Callable[[], Coroutine[Any, Any, T]]", timeout_s: float) -> T:
        if problem := TIMEOUT_S.problem(timeout_s):
            raise ConfigurationError(f"timeout: {problem}")
        with self._lock:
            if self._is_closed:
                raise ClosedError("the snapshot reader is closed")
        connect_timeout_s = min(timeout_s, CONNECT_TIMEOUT_S)
        if self._control is None:
            wait_reachable(self._address, connect_timeout_s)
        try:
            return self._loop.run(work)
        except concurrent.futures.CancelledError:
            raise ClosedError("the snapshot reader was closed meanwhile") from None
        except CallError as error:
            if self._is_closed:
                raise ClosedError("the snapshot reader was closed meanwhile") from None
            if error.refusal is not None or self._has_answered:
                raise error.to_ps_error() from None
            problem = problem_behind_call(self._address, error.code, error.text)
            raise unreachable(self._address, connect_timeout_s, problem) from None
        except Refusal as refusal:
            raise error_of_refusal(refusal) from None

    async def _request(
        self, newer_than: int, timeout_s: float
    ) -> "values.PinnedSnapshot":
        deadline, log = now() + timeout_s, WaitingLog()
        away_until: float | None = None
        while True:
            left_s = max(0.0, deadline - now())
            try:
                found = await self._coordinator().request_snapshot(
                    newer_than, wait_s=left_s, timeout_s=left_s + _ANSWER_MARGIN_S
                )
            except CallError as error:
                if self._has_answered and _is_away(error):
                    away_until = away_until or now() + _RESTART_TIMEOUT_S
                    if now() >= min(away_until, deadline):
                        raise
                elif not _may_pass(error):
                    raise
                elif left_s == 0:
                    raise WaitTimeoutError(
                        f"no snapshot within {timeout_s:g} s: {error.text}"
                    ) from None
                else:
                    log.remind(f"a snapshot ({error.text})")
                await asyncio.sleep(min(_RETRY_INTERVAL_S, left_s))
            else:
                self._has_answered = True
                return found

    def _coordinator(self) -> CoordinatorPort:
        if self._is_closed:  # since the call began, or between two requests
            raise ClosedError("the snapshot reader was closed meanwhile")
        if self._control is None:
            self._control = ControlClient(str(self._address))
        return self._control

    async def _pull(
        self,
        found: "values.PinnedSnapshot",
        since: Snapshot | None,
        progress: Progress | None,
    ) -> Snapshot:
        deadline = now() + found.pin_ttl_ms / 1000 + _ANSWER_MARGIN_S
        if progress is not None:
            progress(0, _byte_count(found))
        try:
            image = SnapshotImage(found.schema, len(found.shards), found.chunk_bytes)
            if since is not None:
                await asyncio.to_thread(image.hold, since._states)
            await all_or_none(
                self._pull_shard(found, shard, image, deadline, progress)
                for shard in found.shards
            )
        finally:
            await self._release(found)
        return Snapshot(
            version=found.version,
            clock=found.clock,
            generation=found.generation,
            job_id=found.job_id,
            byte_count=_byte_count(found),
            received_byte_count=image.received_byte_count,
            _states=states_of(found.schema, image.tensors()),
        )

    async def _release(self, found: "values.PinnedSnapshot") -> None:
        """Lets the shards free the image: they keep two, and need one for each cut."""
        assert self._control is not None, "it found the snapshot"
        # Whatever fails, the pin ends by itself a little later.
        with contextlib.suppress(CallError):
            await self._control.release_snapshot(
                found.snapshot_id, found.pin_id, timeout_s=_ANSWER_MARGIN_S
            )

    async def _pull_shard(
        self,
        found: "values.PinnedSnapshot",
        shard: "values.ShardAddress",
        image: SnapshotImage,
        deadline: float,
        progress: Progress | None,
    ) -> None:
        """Reads a shard's part, and after a call that broke what lacks of it."""

        def add(frame: ChunkFrame) -> None:
            image.add(shard.shard_index, frame)
            if progress is not None:
                progress(image.received_byte_count, _byte_count(found))

        attempt_count, away_until, was_damaged = 0, deadline, False
        while lacking := image.lacking(shard.shard_index):
            try:
                await self._client_of(shard).pull_snapshot(
                    found.job_id,
                    found.snapshot_id,
                    add,
                    timeout_s=left_s(deadline),
                    chunk_indexes=lacking,
                    held_digests=image.expect(lacking),
                )
                image.check_complete(shard.shard_index)
            except CallError as error:
                is_damaged = _reason_of(error) is ErrorReason.CHUNK_DIGEST_MISMATCH
                if is_damaged and not was_damaged:
                    was_damaged = True
                    continue
                if not _is_away(error):
                    raise
                if not attempt_count or image.lacking(shard.shard_index) != lacking:
                    attempt_count = 0
                    away_until = min(deadline, now() + _RESTART_TIMEOUT_S)
                if now() >= away_until:
                    raise
                await pause(attempt_count)
                attempt_count += 1

    def _client_of(self, shard: "values.ShardAddress") -> SnapshotClient:
        if self._is_closed:  # between two calls
            raise ClosedError("the snapshot reader was closed meanwhile")
        key = (shard.address, shard.incarnation)
        if key not in self._shards:
            self._shards[key] = SnapshotClient(shard)
        return self._shards[key]

    async def _close_clients(self) -> None:
        clients = [*self._shards.values()]
        self._shards.clear()
        for client in clients:
            await client.close()
        if self._control is not None:
            await self._control.close()


def _byte_count(found: "values.PinnedSnapshot") -> int:
    return sum(entry.byte_count for entry in found.schema.entries)


def _may_pass(error: CallError) -> bool:
    """Whether the job is only not there yet, or not again."""
    return _reason_of(error) in (
        ErrorReason.NOT_STARTED,
        ErrorReason.RECOVERING,
        ErrorReason.DRAINING,
    )


def _is_away(error: CallError) -> bool:
    """Whether nothing answered, or no more for want of a new token; it may again."""
    is_cut = _reason_of(error) in (None, ErrorReason.CREDENTIAL_ENDED)
    return is_cut and error.is_retryable


def _reason_of(error: CallError) -> ErrorReason | None:
    return None if error.refusal is None else error.refusal.reason


def state_of(
    states: "Mapping[str, OrderedDict[str, torch.Tensor]]", model: str | None
) -> "OrderedDict[str, torch.Tensor]":
    """The state of a model, or of the only one; errors as of `Snapshot.state_dict`."""
    if model is None and len(states) == 1:
        model = next(iter(states))
    if model is None or model not in states:
        names = ", ".join(map(repr, states)) or "none"
        has = "several models" if model is None else f"no model {model!r}"
        raise ConfigurationError(f"the job has {has}: name one of {names}")
    return OrderedDict(states[model])


def states_of(
    schema: "ModelSchema", tensors: "list[torch.Tensor]"
) -> "dict[str, OrderedDict[str, torch.Tensor]]":
    """Values in schema order by their models and names, tied ones under each."""
    states: dict[str, OrderedDict[str, torch.Tensor]] = {}
    for entry, tensor in zip(schema.entries, tensors, strict=True):
        if entry.model == INNER_STATE_MODEL:
            continue
        state = states.setdefault(entry.model, OrderedDict())
        for name in (entry.name, *entry.tied_names):
            state[name] = tensor
    return states
