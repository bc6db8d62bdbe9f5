"""A process of a torch.distributed group, for `test_process_groups`.

Trains on this process's part of each batch, prints what it sees, and saves its model.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psworker
import psworker.data
from tests.integration.group_training import (
    CLIP_NORM,
    SAMPLE_COUNT,
    STEP_COUNT,
    new_model,
    new_optimizer,
    samples,
)

BATCH_SIZE = SAMPLE_COUNT // STEP_COUNT // 2

# Printed by torch where it has no CUDA.
warnings.filterwarnings("ignore", category=UserWarning)


def main(kind: str, folder: str) -> None:
    """Runs one of the scripts below."""
    early = psworker.connect() if kind == "refuse" else None
    dist.init_process_group("gloo")
    if early is not None:
        refuse_early(early)
    try:
        {
            "train": train,
            "fail": fail,
            "lose": lose,
            "plain": plain,
            "refuse": refuse,
        }[kind](folder)
    finally:
        dist.destroy_process_group()


def train(folder: str) -> None:
    """With the model wrapped and a sampler: the group is one worker."""
    rank = dist.get_rank()
    model: nn.Module = DistributedDataParallel(new_model(seed=rank))
    optimizer = new_optimizer(model)
    inputs, targets, _ = samples()
    data = TensorDataset(inputs[:SAMPLE_COUNT], targets[:SAMPLE_COUNT])
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=False)
    loader = DataLoader(
        data, sampler=sampler, batch_size=SAMPLE_COUNT // STEP_COUNT // 2
    )
    ps = psworker.connect(connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60)
    given = (model, optimizer, loader, StepLR(optimizer, 4))
    model, optimizer, loader, scheduler = ps.prepare(*given, clip_grad_norm=CLIP_NORM)
    assert model is given[0]
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    assert ps.last_push is not None
    assert ps.rank in (0, 1)
    assert ps.is_leader == (rank == 0)
    assert ps.worker_count >= 1
    split_in_group(ps)
    print("end", rank, ps.worker_id, ps.clock, ps.mode, ps.last_push.outcome)
    print("bytes", rank, ps.bytes_sent > 0, flush=True)
    ps.close()
    torch.save(list(model.parameters()), f"{folder}/rank-{rank}.pt")
    try:
        optimizer.step()
    except psworker.ClosedError as error:
        print("closed", rank, error, flush=True)
    try:
        ps.wait()
    except psworker.ClosedError as error:
        print("waits", rank, error, flush=True)


def split_in_group(ps: psworker.WorkerConnection) -> None:
    """All processes have the split of the first one that recorded it, or an error."""
    ps.record_split("rows", psworker.data.split(SAMPLE_COUNT))
    try:
        ps.record_split("rows", psworker.data.split(SAMPLE_COUNT, seed=1))
    except psworker.SplitError as error:
        print("split", dist.get_rank(), error, flush=True)


def fail(_: str) -> None:
    """Steps until the job ends."""
    model = DistributedDataParallel(new_model(seed=0))
    ps = psworker.connect(connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60)
    wrapped, optimizer = ps.prepare(model, new_optimizer(model))
    try:
        while True:
            wrapped(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            if ps.clock == 2:
                print("ready", flush=True)
    except psworker.PsError as error:
        print("failed", dist.get_rank(), type(error).__name__, error, flush=True)
    ps.close()


def lose(_: str) -> None:
    """Steps until the leader is killed, which a failpoint does."""
    model = DistributedDataParallel(new_model(seed=0))
    ps = psworker.connect(connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60)
    print("connected", flush=True)
    wrapped, optimizer = ps.prepare(model, new_optimizer(model))
    while True:
        wrapped(torch.ones(2, 6)).sum().backward()
        optimizer.step()


def plain(_: str) -> None:
    """Without a wrapped model: each process is a worker."""
    model = new_model(seed=0)
    with psworker.connect(
        connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60
    ) as ps:
        try:
            split_in_group(ps)
        except psworker.ConfigurationError as error:
            print("early", dist.get_rank(), error, flush=True)
        prepared, optimizer = ps.prepare(model, new_optimizer(model))
        split_in_group(ps)
        prepared(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        print("worker", dist.get_rank(), ps.worker_id, ps.rank, ps.clock, flush=True)
        dist.barrier()  # Nobody leaves before both are counted.


def refuse_early(ps: psworker.WorkerConnection) -> None:
    """One that connected before there was a group."""
    model = DistributedDataParallel(new_model(seed=0))
    try:
        ps.prepare(model, new_optimizer(model))
    except psworker.ConfigurationError as error:
        print("refused", dist.get_rank(), error, flush=True)
    ps.close()


def refuse(_: str) -> None:
    """What is refused is so in every process, with nothing registered for it."""
    model = DistributedDataParallel(new_model(seed=0))
    optimizer = new_optimizer(model)
    other = new_model(seed=1)
    data = TensorDataset(torch.zeros(4, 6))
    half = dist.new_group([0])
    ps = psworker.connect()
    given: list[tuple[object, ...]] = [
        (model, optimizer, DataLoader(data, batch_size=2)),
        (model, other, optimizer),
        (model,),
    ]
    if dist.get_rank() == 0:
        small = DistributedDataParallel(other, process_group=half)
        given.append((small, new_optimizer(small)))
    for objects in given:
        try:
            ps.prepare(*objects)
        except psworker.ConfigurationError as error:
            print("refused", dist.get_rank(), error, flush=True)
    ps.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
