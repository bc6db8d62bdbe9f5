"""The user's models and optimizers as the job's schema, matched by identity.

Parameters come first in the order of registration, then persistent buffers by type and
in that order: the entries of `state_dict()`. Tensors that are registered under several
names travel once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pswire.optimizers import SUPPORTED, flatten_group
from pswire.reasons import Refusal
from pswire.schema import (
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.schema_codec import check_group_count
from pswire.torch_types import element_type_of
from psworker.errors import (
    ConfigurationError,
    UnsupportedError,
    error_of_refusal,
    refuse_name,
)
from psworker.optim.optimizer_class import class_of
from psworker.optim.wrappers import without_wrappers


@dataclass(frozen=True, slots=True)
class BoundSchema:
    """A schema and the tensors it describes.

    Attributes:
        schema: What is sent.
        tensors: The user's tensor of each entry.
        models: The plain models by name, without wrappers.
    """

    schema: ModelSchema
    tensors: tuple[torch.Tensor, ...]
    models: Mapping[str, nn.Module] = field(default_factory=dict)

    def index_of_tensors(self) -> dict[int, int]:
        """Position of each entry by `id()` of its tensor."""
        return {id(tensor): index for index, tensor in enumerate(self.tensors)}


def bind_models(models: Mapping[str, nn.Module]) -> BoundSchema:
    """Describes models, by the name that each has in the job.

    Raises:
        ConfigurationError: A tensor has no values yet, or belongs to two models.
        UnsupportedError: A tensor is of a type or layout that can't be sent.
    """
    plain = {name: without_wrappers(model) for name, model in models.items()}
    bound: list[tuple[SchemaEntry, torch.Tensor]] = []
    for name, model in plain.items():
        _refuse_renorming(name, model)
        for tensor, names in _by_tensor(model.named_parameters(remove_duplicate=False)):
            bound.append((_entry(name, names, tensor, EntryKind.PARAMETER), tensor))
    buffers: list[tuple[SchemaEntry, torch.Tensor]] = []
    for name, model in plain.items():
        for tensor, names in _by_tensor(persistent_buffers(model)):
            buffers.append((_entry(name, names, tensor, EntryKind.BUFFER), tensor))
    # A chunk ends where the type changes: between the statistics and the counts of
    # fifty batch norms it would a hundred times.
    bound += sorted(buffers, key=lambda each: each[0].element_type)
    _refuse_sharing(bound)
    for entry, _ in bound:
        for name in (entry.name, *entry.tied_names):
            refuse_name(
                f"name of a tensor of {entry.model},",
                name,
                "rename the module or the parameter",
            )
    schema = ModelSchema(tuple(entry for entry, _ in bound))
    try:
        schema.validate()
    except Refusal as refusal:
        raise error_of_refusal(refusal) from None
    return BoundSchema(schema, tuple(tensor for _, tensor in bound), plain)


def describe_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    bound: BoundSchema,
    *,
    exchange_count: int = 0,
    loss_is_sum: bool = False,
) -> OptimizerSpec:
    """Describes an optimizer over a schema.

    Args:
        name: Its name in the job.
        optimizer: The user's.
        bound: The schema.
        exchange_count: How many others had its place before.
        loss_is_sum: Whether its gradients are added up over the workers.

    Raises:
        OptimizerUnsupportedError: Shards can't run what it does.
        ConfigurationError: It holds an unknown parameter, or one twice.
        HyperparameterError: A value of a group is no number.
    """
    try:
        class_name = class_of(optimizer, name)
    except Refusal as refusal:
        raise error_of_refusal(refusal) from None
    return OptimizerSpec(
        name=name,
        class_name=class_name,
        hyperparameter_names=SUPPORTED[class_name].names,
        groups=describe_groups(name, class_name, optimizer, bound),
        exchange_count=exchange_count,
        loss_is_sum=loss_is_sum,
    )


def describe_groups(
    name: str, class_name: str, optimizer: torch.optim.Optimizer, bound: BoundSchema
) -> tuple[ParameterGroup, ...]:
    """Describes the groups that an optimizer has now; `name` is its name in the job.

    Raises:
        ConfigurationError: A group holds an unknown parameter, or one that is in
            another group or place too.
        HyperparameterError: A value of a group is no number.
        LimitError: There are too many groups.
        UnsupportedError: A group is differentiable.
    """
    indexes = bound.index_of_tensors()
    if not optimizer.param_groups:
        raise ConfigurationError(
            f"{name} has no parameter groups: leave one, which may be empty, or skip "
            "the step"
        )
    places: dict[int, int] = {}
    groups: list[ParameterGroup] = []
    try:
        check_group_count(len(optimizer.param_groups), f"optimizer {name!r}")
        for position, group in enumerate(optimizer.param_groups):
            where = f"group {position} of {name}"
            found = tuple(
                _index_of(parameter, bound, indexes, where)
                for parameter in parameters_of(group, name, position)
            )
            for index in found:
                if index in places:
                    raise ConfigurationError(
                        f"{where} holds {bound.schema.entries[index].name!r}, which "
                        f"group {places[index]} holds already: a step updates a "
                        "parameter once, so leave it in one place"
                    )
                places[index] = position
            groups.append(
                ParameterGroup(
                    found, flatten_group(class_name, group, optimizer.defaults)
                )
            )
    except Refusal as refusal:
        raise error_of_refusal(refusal) from None
    refuse_differentiable(optimizer)
    return tuple(groups)


def parameters_of(group: object, name: str, position: int) -> Sequence[object]:
    """What a group of an optimizer holds, without a look at any value.

    Raises:
        ConfigurationError: It is not kept in an order that can be read again.
    """
    held = group.get("params") if isinstance(group, Mapping) else None
    if isinstance(held, list):
        # Not by an iterator of its own, which may wait for values of a step.
        return tuple(list.__iter__(held))
    if isinstance(held, tuple | nn.ParameterList):
        return tuple(held)
    raise ConfigurationError(
        f"the parameters of group {position} of {name} are in an object of type "
        f"{type(held).__name__}: they must be in a list, which is read at every step"
    )


def _index_of(
    parameter: object, bound: BoundSchema, indexes: dict[int, int], where: str
) -> int:
    index = indexes.get(id(parameter))
    if not isinstance(parameter, torch.Tensor):
        raise ConfigurationError(
            f"{where} holds a {type(parameter).__name__} where a parameter belongs"
        )
    if index is None:
        raise ConfigurationError(
            f"{where} holds a parameter of shape {list(parameter.shape)} that belongs "
            "to no model given to prepare(); pass every model that the optimizer "
            "updates, and build the optimizer after the model was moved or replaced"
        )
    entry = bound.schema.entries[index]
    if entry.kind is EntryKind.BUFFER:
        raise ConfigurationError(
            f"{where} holds {entry.name!r} of {entry.model}, a {entry.described}, "
            "which no optimizer updates: leave it out of the optimizer, or make it an "
            "nn.Parameter of floats"
        )
    return index


def _by_tensor(
    named: Iterator[tuple[str, torch.Tensor]],
) -> list[tuple[torch.Tensor, list[str]]]:
    """Tensors with all their names, in the order of their first one."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are in `state_dict()`, under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _entry(
    model: str, names: Sequence[str], tensor: torch.Tensor, kind: EntryKind
) -> SchemaEntry:
    label = f"{kind.name.lower()} {names[0]!r} of {model}"
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise ConfigurationError(
            f"{label} has no values yet; run one batch through the model, or load it "
            "onto a device, before prepare()"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"{label} is sparse or quantized: only dense tensors go")
    try:
        element_type = element_type_of(tensor.dtype)
    except Refusal as refusal:
        raise UnsupportedError(f"{label}: {refusal.message}") from None
    if kind == EntryKind.PARAMETER and not element_type.is_floating:
        # torch allows it without gradients; it then behaves as a buffer does.
        kind = EntryKind.BUFFER
    return SchemaEntry(
        model=model,
        name=names[0],
        shape=tuple(tensor.shape),
        element_type=element_type,
        kind=kind,
        tied_names=tuple(names[1:]),
        trainable=tensor.requires_grad,
    )


def _refuse_sharing(bound: Sequence[tuple[SchemaEntry, torch.Tensor]]) -> None:
    owners: dict[int, SchemaEntry] = {}
    for entry, tensor in bound:
        first = owners.setdefault(id(tensor), entry)
        if first is not entry:
            raise ConfigurationError(
                f"{first.model} and {entry.model} share the tensor {first.name!r}; put "
                "both models into one nn.Module, which may hold ties"
            )


def _refuse_renorming(model_name: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
        ):
            raise UnsupportedError(
                f"{name or type(module).__name__} of {model_name} has max_norm="
                f"{module.max_norm:g}: it scales rows of its weight within forward(), "
                "which shards never see; build it without max_norm, and scale what it "
                "returns in the model's own forward()"
            )


def refuse_differentiable(optimizer: torch.optim.Optimizer) -> None:
    """Checks that no group wants gradients of its own updates.

    Raises:
        UnsupportedError: One does.
    """
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            "differentiable=True needs the optimizer inside this process; build it "
            "without"
        )
