"""Which optimizers take which gradients, and what a user is told."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pswire.frames import REQUEST_CHUNK_FIELD
from pswire.limits import CHUNK_BYTES_MAX, MESSAGE_BYTES_MAX
from pswire.placement import place
from psworker.errors import UnsupportedError
from psworker.optim import gradients
from psworker.optim.gradients import refuse_gradients
from psworker.optim.model_schema import bind_models, describe_optimizer
from psworker.optim.prepare import sort_objects
from psworker.tensors.tensor_chunks import ChunkSource


class Model(nn.Module):
    def __init__(self, *, is_tied: bool = False, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=sparse)
        self.head = nn.Linear(3, 5, bias=False)
        if is_tied:
            self.head.weight = self.words.weight


def groups(model: Model, decay_of_words: float) -> list[dict[str, object]]:
    return [
        {"params": [model.head.weight], "weight_decay": 0.1},
        {"params": [model.words.weight], "weight_decay": decay_of_words},
    ]


Make = Callable[[Model], torch.optim.Optimizer]

REFUSED: list[tuple[Make, str]] = [
    (
        lambda model: torch.optim.Adam(model.parameters()),
        "words of model has sparse=True, and its weight is in group 0 of 'optimizer': "
        "Adam does not take sparse gradients, in torch neither; build the module with "
        "sparse=False, or give its weight to a torch.optim.SparseAdam of its own",
    ),
    (
        lambda model: torch.optim.RMSprop(model.parameters()),
        "words of model has sparse=True, and its weight is in group 0 of 'optimizer': "
        "RMSprop does not take sparse gradients, in torch neither; build the module "
        "with sparse=False, or give its weight to a torch.optim.SparseAdam of its own",
    ),
    (
        lambda model: torch.optim.SGD(groups(model, 0.02), lr=0.1),
        "words of model has sparse=True, and its weight is in group 1 of 'optimizer': "
        "SGD with weight_decay=0.02 does not take sparse gradients, in torch neither, "
        "since the decay would change every row; put the weight into a group with "
        "weight_decay=0, or build the module with sparse=False",
    ),
    (
        lambda model: torch.optim.Adagrad(groups(model, 0.5)),
        "words of model has sparse=True, and its weight is in group 1 of 'optimizer': "
        "Adagrad with weight_decay=0.5 does not take sparse gradients, in torch "
        "neither, since the decay would change every row; put the weight into a group "
        "with weight_decay=0, or build the module with sparse=False",
    ),
]

TAKEN: list[Make] = [
    lambda model: torch.optim.SGD(groups(model, 0.0), lr=0.1, momentum=0.9),
    lambda model: torch.optim.Adagrad(groups(model, 0.0)),
    lambda model: torch.optim.SparseAdam([model.words.weight]),
    lambda model: torch.optim.Adam([model.head.weight]),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_prepare_names_the_module_and_the_cures(make: Make, text: str) -> None:
    model = Model()

    with pytest.raises(UnsupportedError) as caught:
        sort_objects([model, make(model)])
    assert str(caught.value) == text


@pytest.mark.parametrize("make", TAKEN)
def test_prepare_takes_what_torch_takes(make: Make) -> None:
    model = Model()
    sort_objects([model, make(model)])


def test_a_frozen_table_has_no_gradient() -> None:
    model = Model()
    model.words.weight.requires_grad_(False)
    sort_objects([model, torch.optim.Adam(model.parameters())])


def test_a_tied_table_may_have_a_dense_gradient() -> None:
    model = Model(is_tied=True)
    sort_objects([model, torch.optim.Adam(model.parameters())])


def refusal_at_step(model: Model, optimizer: torch.optim.Optimizer) -> str:
    bound = bind_models({"model": model})
    spec = describe_optimizer("optimizer", optimizer, bound)
    values = tuple(group.hyperparameters for group in spec.groups)
    held = [tensor.grad for tensor in bound.tensors]
    with pytest.raises(UnsupportedError) as caught:
        refuse_gradients(spec, values, held)
    return str(caught.value)


def test_a_sparse_gradient_that_prepare_could_not_foresee_is_refused() -> None:
    model = Model(sparse=False)
    rows = torch.tensor([1])
    nn.functional.embedding(rows, model.words.weight, sparse=True).sum().backward()

    text = refusal_at_step(model, torch.optim.Adam(model.parameters()))

    assert text.startswith(
        "a parameter of shape [5, 3] in group 0 of 'optimizer' has a sparse gradient: "
        "Adam does not take sparse gradients"
    )


def test_a_decay_that_came_later_is_refused() -> None:
    model = Model()
    model.words(torch.tensor([1])).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = 0.25

    assert "SGD with weight_decay=0.25" in refusal_at_step(model, optimizer)


def test_sparse_adam_refuses_dense_gradients_as_torch_does() -> None:
    model = Model()
    model.head(model.words(torch.tensor([1]))).sum().backward()

    text = refusal_at_step(model, torch.optim.SparseAdam(model.parameters()))

    assert text == (
        "a parameter of shape [5, 3] in group 0 of 'optimizer' has a dense gradient: "
        "SparseAdam takes sparse gradients only, as in torch; give the parameter to "
        "torch.optim.Adam, or, if it is an embedding's, build that with sparse=True "
        "and use its weight nowhere else"
    )


@pytest.mark.parametrize("class_name", ["SGD", "Adagrad", "SparseAdam"])
def test_gradients_that_torch_takes_pass(class_name: str) -> None:
    model = Model()
    model.words(torch.tensor([1])).sum().backward()
    optimizer = getattr(torch.optim, class_name)(model.parameters(), lr=0.1)
    bound = bind_models({"model": model})
    spec = describe_optimizer("optimizer", optimizer, bound)

    refuse_gradients(
        spec,
        tuple(group.hyperparameters for group in spec.groups),
        [tensor.grad for tensor in bound.tensors],
    )


@pytest.mark.parametrize(
    ("row_count", "is_refused"), [(900_000, True), (800_000, False)]
)
def test_rows_that_are_mostly_their_numbers_are_refused(
    row_count: int, is_refused: bool
) -> None:
    """More rows of one bfloat16 than a message has room for the numbers of."""
    table = nn.Embedding(1_000_000, 1, sparse=True, dtype=torch.bfloat16)
    table(torch.arange(row_count)).sum().backward()
    bound = bind_models({"model": table})
    optimizer = torch.optim.SparseAdam(table.parameters())
    spec = describe_optimizer("optimizer", optimizer, bound)
    placement = place(bound.schema, 1, CHUNK_BYTES_MAX)
    held = gradients.collect_gradients([table.weight])

    if is_refused:
        with pytest.raises(UnsupportedError, match=r"900000 rows of 2 bytes.*=False"):
            refuse_gradients(spec, (spec.groups[0].hyperparameters,), held)
    else:
        refuse_gradients(spec, (spec.groups[0].hyperparameters,), held)
    source = ChunkSource(held)
    largest = max(
        len(source.encode(chunk, REQUEST_CHUNK_FIELD)) for chunk in placement.chunks
    )
    assert (largest > MESSAGE_BYTES_MAX) is is_refused
