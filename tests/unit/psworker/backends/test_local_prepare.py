"""Without a job `prepare` may be called again too, so that a script stays as it is."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psworker.connection import LocalConnection
from psworker.errors import ClosedError, ConfigurationError


def test_another_optimizer_may_be_prepared_half_way() -> None:
    ps = LocalConnection()
    model = nn.Linear(2, 1)
    model, first = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    first.step(weight=2)

    second = ps.prepare(torch.optim.Adam(model.parameters()))
    again, same = ps.prepare(model, second)
    same.step(weight=2)

    assert (again, same) == (model, second)
    assert ps.clock == 2
    assert ps.is_leader


def test_names_give_a_dict_for_a_dict_and_name_the_loader() -> None:
    ps = LocalConnection()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)

    prepared = ps.prepare({"net": model, "opt": optimizer, "train": loader})

    assert list(prepared) == ["net", "opt", "train"]
    assert prepared["net"] is model
    assert prepared["opt"] is optimizer
    for (x,) in prepared["train"]:
        model(x).sum().backward()
        optimizer.step()
    assert prepared["train"].report.loader == "train"
    again = ps.prepare(net=model, train=prepared["train"])
    assert again == (model, prepared["train"])


def _prepared() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(12.0).view(6, 2))
    prepared: tuple[nn.Module, torch.optim.Optimizer, Any] = LocalConnection().prepare(
        model, optimizer, DataLoader(data, batch_size=1)
    )
    return prepared


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_report_tells_what_was_skipped(*, set_to_none: bool) -> None:
    """Before its call, after it, and after its backward pass."""
    model, optimizer, loader = _prepared()
    for epoch in range(2):
        for number, (x,) in enumerate(loader):
            if number == 0:
                continue
            loss = model(x).sum()
            if number == 2:
                continue
            loss.backward()
            if number != 3:
                optimizer.step()
            optimizer.zero_grad(set_to_none)
        report = loader.report
        assert (report.epoch, report.seen_once, report.skipped) == (epoch, 3, 3)


def test_a_report_of_an_epoch_that_was_drawn_ahead_is_of_its_last_step() -> None:
    model, optimizer, loader = _prepared()
    for _ in range(2):
        iteration = iter(loader)
        batch = next(iteration, None)
        while batch is not None:
            following = next(iteration, None)
            model(batch[0]).sum().backward()
            optimizer.step()
            batch = following
        assert (loader.report.seen_once, loader.report.skipped) == (6, 0)


def test_a_model_that_is_prepared_later_is_watched_too() -> None:
    ps = LocalConnection()
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    sgd = torch.optim.SGD(first.parameters(), lr=0.1)
    first, _, loader = ps.prepare(first, sgd, data)
    second, sgd = ps.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
    for number, (x,) in enumerate(loader):
        loss = second(x).sum()
        if number:
            loss.backward()
            sgd.step()
    assert (loader.report.seen_once, loader.report.skipped) == (2, 2)


def test_what_it_does_not_take_is_refused_again_too() -> None:
    ps = LocalConnection()
    model = nn.Linear(2, 1)
    ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(ConfigurationError, match="does not take a str"):
        ps.prepare("optimizer")


def test_another_norm_to_clip_to_is_refused_as_in_a_job() -> None:
    ps = LocalConnection()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ps.prepare(model, optimizer, clip_grad_norm=1.5)

    ps.prepare(optimizer)
    ps.prepare(optimizer, clip_grad_norm=1.5)
    with pytest.raises(
        ConfigurationError,
        match=r"the job clips as the first prepare\(\) said, clip_grad_norm=1\.5; ",
    ):
        ps.prepare(optimizer, clip_grad_norm=2.0)


def test_the_word_of_the_loss_is_checked_as_in_a_job_and_changes_nothing() -> None:
    ps = LocalConnection()
    model = nn.Linear(2, 1)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match='neither "mean" nor "sum"'):
        ps.prepare(model, given, loss="total")
    model, optimizer = ps.prepare(model, given, loss="sum")
    before = model.weight.detach().clone()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step(weight=3)

    torch.testing.assert_close(model.weight.detach(), before - 0.3)
    ps.prepare(optimizer)
    with pytest.raises(ConfigurationError, match='loss="sum"; leave it out'):
        ps.prepare(optimizer, loss="mean")


def test_waiting_is_refused_after_close() -> None:
    ps = LocalConnection()
    ps.wait()
    ps.close()

    with pytest.raises(ClosedError, match="the connection is closed"):
        ps.wait()
