"""A prepared loader's attributes: those of the user's loader, to read and to set."""

from typing import Any

from torch.utils.data import DataLoader


class PreparedLoader:
    """Has the attributes of the loader that was prepared.

    What a script sets here is set there, and counts, or is refused, as without a job: a
    `collate_fn` from the next iteration on, a `batch_size` never. Only names that the
    wrapper itself has are its own.
    """

    # Set last in `__init__`: from then on the wrapper has no new names.
    _loader: DataLoader[Any]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401, the wrapped one's
        if name == "_loader":  # Not yet set while being made, unpickled or copied.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self._loader, name)

    def _is_own(self, name: str) -> bool:
        own = vars(self)
        return "_loader" not in own or name in own or hasattr(type(self), name)
