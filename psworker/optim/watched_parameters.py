"""The parameters of an optimizer's group, which are waited for when they are looked up.

Scripts read weights through `optimizer.param_groups` too, as for their norm.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from typing_extensions import override


class WatchedParameters(list[torch.Tensor]):
    """A list of parameters. A copy or pickle of it is a plain list."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], about_to_read: Callable[[], None]
    ) -> None:
        """Waits for nothing yet.

        Args:
            parameters: Of one group.
            about_to_read: Returns once the newest values have come.
        """
        super().__init__(parameters)
        self._about_to_read = about_to_read

    @override
    def __getitem__(self, index: Any) -> Any:
        self._about_to_read()
        return super().__getitem__(index)

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        self._about_to_read()
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
