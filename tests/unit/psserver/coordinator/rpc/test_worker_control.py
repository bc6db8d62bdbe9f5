"""What the coordinator tells a worker that another one could ask for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.worker_control import WorkerControl
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.access import Access
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.limits import PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.security.roles import Identity, Role
from pswire.v1 import coordinator_service_pb2 as messages
from tests.refusals import refused

if TYPE_CHECKING:
    from psserver.edge.guard import Context

METHOD = "/pswire.v1.CoordinatorService/RegisterWorker"


class Certified:
    """A call of a worker with a certificate."""

    def __init__(self, worker_id: str) -> None:
        self._names = [Identity(Role.WORKER, worker_id).uri.encode()]

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": self._names}

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"


async def test_whoever_knows_a_process_is_not_registered_as_its_worker(
    tmp_path: Path,
) -> None:
    with JobStore(tmp_path) as store:
        settings = CoordinatorSettings(job_id="job", shard_count=1, workers_min=2)
        control = WorkerControl(CoordinatorHost(settings, store))
        handler: Any = grpc.unary_unary_rpc_method_handler(control.register_worker)

        async def find(_: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
            return handler

        details = cast(
            "grpc.HandlerCallDetails", type("Details", (), {"method": METHOD})
        )
        checked = await Access().intercept_service(find, details)
        assert checked is not None
        register = cast("Any", checked.unary_unary)
        request = messages.RegisterWorkerRequest(
            protocol_version=PROTOCOL_VERSION, process_id="p"
        )
        context = cast("Context", Certified("w0"))
        assert (await register(request, context)).worker.worker_id == "w0"
        assert (await register(request, context)).worker.incarnation == 1
        with refused(
            ErrorReason.PERMISSION_DENIED, "'w1' may not speak for worker 'w0'"
        ):
            await register(request, cast("Context", Certified("w1")))
