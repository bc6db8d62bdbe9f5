"""Fixtures of more than one module."""

from collections.abc import Iterator

import grpc
import pytest
import torch
from torch import nn

from tests.integration.forged_calls import Target
from tests.integration.job import Job, connect


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch, Job(folder, sockets=True) as job:
        # A forged seed is held until its fence could have come, and a push that lacks
        # its trailer is looked at so often.
        for module in ("seed_call", "parameter_service"):
            patch.setattr(f"psserver.shard.rpc.{module}.WAITING_INTERVAL_MS", 100)
        with connect(job, "w0") as ps:
            model = nn.ParameterList([torch.ones(1024), torch.ones(1024)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = ps.prepare(model, optimizer)

            def step() -> None:
                before = [each.detach().clone() for each in model.parameters()]
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                for old, new in zip(before, model.parameters(), strict=True):
                    torch.testing.assert_close(new.detach(), old - 0.1)

            step()
            with (
                grpc.insecure_channel(job.shard_addresses()[0]) as channel,
                grpc.insecure_channel(job.address) as coordinator,
            ):
                yield Target(job, channel, coordinator, step)
