"""The coordinator's service, put together from what each kind of caller needs."""

import grpc

from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.data_control import DataControl
from psserver.coordinator.rpc.public_control import PublicControl
from psserver.coordinator.rpc.shard_control import ShardControl
from psserver.coordinator.rpc.worker_control import WorkerControl

SERVICE = "pswire.v1.CoordinatorService"


def coordinator_handler(host: CoordinatorHost) -> grpc.GenericRpcHandler:
    """All methods of the service."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            **ShardControl(host).methods(),
            **WorkerControl(host).methods(),
            **DataControl(host).methods(),
            **PublicControl(host).methods(),
        },
    )
