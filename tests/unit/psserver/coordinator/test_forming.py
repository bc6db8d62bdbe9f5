"""What `psserver form` says of a job whose coordinator has lost its state, and does."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from psserver.config import ListenConfig
from psserver.coordinator.forming import form
from psserver.coordinator.storage.job_store import DATABASE, IDENTITY, JobStore
from psserver.edge import access
from psserver.edge.state_folder import StateFolderError, held_folder
from pswire.addresses import Address
from pswire.checkpoint.errors import DamagedError, MissingError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import MANIFEST
from pswire.error_details import refusal_from_rpc_error
from pswire.reasons import ErrorReason
from pswire.security.roles import Role
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from tests.doubles.checkpoints import save
from tests.doubles.free_addresses import free_address
from tests.doubles.job_tokens import JobTokens

JOB: Final = "job"
NAME: Final = "step-000000000500"


def job_in(folder: Path) -> Path:
    """The state folder of a job's coordinator that has ended."""
    with held_folder(folder), JobStore(folder) as store:
        store.save_job(job_id=JOB, job_seed=7, shard_count=2)
    return folder


def damaged(folder: Path) -> Path:
    (job_in(folder) / DATABASE).write_bytes(b"no database" * 100)
    return folder


def checkpoints_in(folder: Path) -> Path:
    checkpoints = CheckpointFolder(str(folder))
    checkpoints.claim(JOB, "token")
    save(checkpoints, 500, job_id=JOB)
    return folder


async def formed(
    state_dir: Path,
    checkpoint_dir: Path,
    *,
    address: Address | None = None,
    tokens: Path | None = None,
    wait_s: float = 0.1,
    is_wanted: bool = False,
) -> None:
    await form(
        listen=ListenConfig(address=address or Address("127.0.0.1", 0), tokens=tokens),
        state_dir=state_dir,
        checkpoint_url=str(checkpoint_dir),
        wait_s=wait_s,
        is_wanted=is_wanted,
        as_json=True,
    )


def test_a_plan_changes_nothing_and_with_yes_what_is_damaged_is_kept_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, checkpoints = damaged(tmp_path / "state"), checkpoints_in(tmp_path / "saved")
    before = {each.name: each.read_bytes() for each in state.iterdir()}

    asyncio.run(formed(state, checkpoints))
    plan = json.loads(capsys.readouterr().out)
    assert {each.name: each.read_bytes() for each in state.iterdir()} == before
    assert "job.sqlite in state folder" in plan["problem"]
    assert plan["checkpoint"]["name"] == NAME
    assert (plan["shards"], plan["lost_steps"], plan["set_aside"]) == ([], None, None)

    asyncio.run(formed(state, checkpoints, is_wanted=True))
    done = json.loads(capsys.readouterr().out)
    aside = Path(done["set_aside"])
    assert {each.name: each.read_bytes() for each in aside.iterdir()} == {
        name: before[name] for name in (DATABASE, IDENTITY)
    }
    with JobStore(state) as store:
        assert store.load() is None

    asyncio.run(formed(state, checkpoints, is_wanted=True))
    again = json.loads(capsys.readouterr().out)
    assert (again["problem"], again["set_aside"]) == (None, None)


async def heard(call: Any) -> ErrorReason:  # noqa: ANN401, of two kinds
    """How a call is answered, once something listens there."""
    while True:
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            refusal = refusal_from_rpc_error(error)
            if refusal is not None:
                return refusal.reason


@pytest.mark.parametrize(("job_id", "is_refused"), [(JOB, False), ("other", True)])
def test_shards_that_live_are_heard_and_keep_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job_id: str, is_refused: bool
) -> None:
    state, checkpoints = damaged(tmp_path / "state"), checkpoints_in(tmp_path / "saved")
    address = free_address()

    async def run() -> list[ErrorReason]:
        async with (
            asyncio.timeout(30),
            grpc.aio.insecure_channel(str(address)) as channel,
        ):
            stub: Any = CoordinatorServiceStub(channel)
            identity: dict[str, Any] = {
                "job_id": job_id,
                "incarnation": 3,
                "process_id": "p",
            }

            async def watch() -> None:
                request = messages.WatchShardRequest(shard_index=0, **identity)
                async for _ in stub.WatchShard(request):
                    pytest.fail("nothing is sent")

            async def report(index: int) -> None:
                await stub.ReportProgress(
                    messages.ReportProgressRequest(
                        shard_index=index, frontier=260, version=520, **identity
                    )
                )

            async def join() -> None:
                await stub.Join(iter([messages.JoinRequest()]))

            forming = asyncio.create_task(
                formed(state, checkpoints, address=address, wait_s=30)
            )
            reasons = [await heard(watch), await heard(join)]
            reasons += [await heard(lambda i=i: report(i)) for i in range(2)]
            await forming
            return reasons

    if is_refused:
        with pytest.raises(StateFolderError, match="is of job other"):
            asyncio.run(run())
        return
    assert asyncio.run(run()) == [ErrorReason.RECOVERING] * 4
    plan = json.loads(capsys.readouterr().out)
    assert [(s["shard_index"], s["clock"], s["version"]) for s in plan["shards"]] == [
        (0, 260, 520),
        (1, 260, 520),
    ]
    assert plan["lost_steps"] == 20


async def test_a_token_that_is_revoked_meanwhile_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOOK_INTERVAL_S", 0.05)
    state, checkpoints = damaged(tmp_path / "state"), checkpoints_in(tmp_path / "saved")
    tokens, address = JobTokens(tmp_path), free_address()
    shown = tokens.metadata(Role.SHARD.value)
    forming = asyncio.create_task(
        formed(state, checkpoints, address=address, tokens=tokens.store, wait_s=60)
    )
    async with grpc.aio.insecure_channel(str(address)) as channel:
        report = CoordinatorServiceStub(channel).ReportProgress
        call = partial(report, messages.ReportProgressRequest(), metadata=shown)
        async with asyncio.timeout(30):
            assert await heard(call) is ErrorReason.RECOVERING
            tokens.revoke(Role.SHARD.value)
            while await heard(call) is ErrorReason.RECOVERING:
                pass
            assert await heard(call) is ErrorReason.UNAUTHENTICATED
    forming.cancel()
    await asyncio.wait([forming])


def of_local(folder: Path) -> Path:
    damaged(folder / "coordinator")
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [(job_in, "is whole: start the coordinator"), (of_local, "name that one")],
)
def test_what_needs_no_forming_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], said: str
) -> None:
    state = make(tmp_path / "state")
    with pytest.raises(StateFolderError, match=said):
        asyncio.run(formed(state, checkpoints_in(tmp_path / "saved"), is_wanted=True))


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    state = damaged(tmp_path / "state")
    with held_folder(state), pytest.raises(StateFolderError, match="in use"):
        asyncio.run(formed(state, tmp_path, is_wanted=True))


def test_without_a_good_checkpoint_the_state_stays(tmp_path: Path) -> None:
    state, saved = damaged(tmp_path / "state"), tmp_path / "saved"
    with pytest.raises(MissingError, match="there are no checkpoints"):
        asyncio.run(formed(state, saved, is_wanted=True))
    (checkpoints_in(saved) / NAME / MANIFEST).write_bytes(b"{}")
    with pytest.raises(DamagedError, match="no checkpoint is good"):
        asyncio.run(formed(state, saved, is_wanted=True))
    assert (state / DATABASE).exists()
