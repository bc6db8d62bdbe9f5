"""Which gradients a push has carried already.

A script may call `zero_grad()` right before `backward()` instead of right after
`step()`. Between two steps the gradient of the last one then lies in `.grad` still,
and is no sign that another one was begun.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from psworker.optim.gradients import stored_elements


class _Mark(NamedTuple):
    """A gradient as it was when a push carried it.

    Attributes:
        tensor: Weak, so that it costs no memory once it was set to `None`.
        version: torch's count of changes in place.
    """

    tensor: "weakref.ref[torch.Tensor]"
    version: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> "_Mark":
        return cls(weakref.ref(gradient), gradient._version)

    def is_on(self, gradient: torch.Tensor) -> bool:
        return self.tensor() is gradient and self.version == gradient._version


class SpentGradients:
    """The gradients of the last push of each parameter."""

    def __init__(self, entry_count: int) -> None:
        """Notes nothing yet.

        Args:
            entry_count: Entries of the schema.
        """
        self._marks: list[_Mark | None] = [None] * entry_count

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A push carries these, one for each entry; what is `None` stays as it was."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._marks[index] = _Mark.of(gradient)

    def has_new(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any parameter has a gradient that no push carried as it is now."""
        return any(
            gradient is not None and not (mark is not None and mark.is_on(gradient))
            for gradient, mark in zip(
                (parameter.grad for parameter in parameters), self._marks, strict=True
            )
        )

    def differ_from(self, parameters: Sequence[torch.Tensor]) -> bool:
        """As `has_new`; notes those that there are."""
        is_other = self.has_new(parameters)
        self.note([parameter.grad for parameter in parameters])
        return is_other

    def has_others(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any parameter has a gradient that no push carried and is not zero."""
        return any(
            gradient is not None
            and not (mark is not None and mark.is_on(gradient))
            and bool(stored_elements(gradient).any())
            for gradient, mark in zip(
                (parameter.grad for parameter in parameters), self._marks, strict=True
            )
        )
