import torch
from torch import nn

from psworker.optim.gradients import SpentGradients, collect_gradients


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]


def backward(parameters: list[nn.Parameter]) -> None:
    sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]


def held(parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


def test_only_a_gradient_that_is_not_zero_counts() -> None:
    first, second = given = parameters()
    spent = SpentGradients(2)
    assert not spent.has_others(given)

    first.grad = torch.zeros(2)
    assert not spent.has_others(given)

    second.grad = torch.tensor([0.0, 1.0])
    assert spent.has_others(given)


def test_what_a_push_carried_does_not_count_though_it_lies_there_still() -> None:
    given = parameters()
    spent = SpentGradients(2)
    backward(given)
    spent.note(held(given))

    assert not spent.has_others(given)


def test_a_gradient_added_to_one_that_was_carried_counts() -> None:
    given = parameters()
    spent = SpentGradients(2)
    backward(given)
    spent.note(held(given))
    backward(given[1:])

    assert spent.has_others(given)


def test_a_new_gradient_counts_also_in_the_place_of_an_old_one() -> None:
    given = parameters()
    spent = SpentGradients(2)
    for _ in range(3):
        for parameter in given:
            parameter.grad = None
        backward(given)
        assert spent.has_others(given)
        spent.note(held(given))


def test_what_another_optimizer_carried_stays_carried() -> None:
    first, second = given = parameters()
    spent = SpentGradients(2)
    backward(given)
    spent.note([first.grad, None])
    assert spent.has_others(given)
    spent.note([None, second.grad])

    assert not spent.has_others(given)


def test_sparse_gradients_count_by_their_values() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    spent = SpentGradients(1)

    table(torch.tensor([3, 3])).sum().backward()  # not coalesced yet
    assert spent.has_others([table.weight])

    (carried,) = collect_gradients([table.weight])
    spent.note([carried])
    assert not spent.has_others([table.weight])

    table(torch.tensor([1])).sum().backward()
    assert spent.has_others([table.weight])

    table.weight.grad = None
    table(torch.tensor([], dtype=torch.int64)).sum().backward()
    assert not spent.has_others([table.weight])
