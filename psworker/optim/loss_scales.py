"""Loss scales that fall on all workers when the gradient of one was not finite."""

from collections.abc import Iterable

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from psworker.optim.push_result import PushResult


class LossScales:
    """The scalers of a script, as far as one of its optimizers is concerned.

    Each scaler sees only what is infinite in this process. A clock that the shards have
    skipped is noted in it as if that had been found here, so that the next `update()`
    lowers the scale of every worker that has stepped.
    """

    def __init__(self, scalers: Iterable[GradScaler] = ()) -> None:
        self._scalers = tuple(each for each in scalers if each.is_enabled())

    def __bool__(self) -> bool:
        return bool(self._scalers)

    def note(self, optimizer: Optimizer, result: PushResult) -> None:
        """Notes the result of a step in the scaler of its optimizer."""
        if not (result.skipped or result.nonfinite_worker_ids):
            return
        for scaler in self._scalers:
            # By device; nothing, for a scaler that does not step this optimizer.
            for found in scaler._found_inf_per_device(optimizer).values():
                found.fill_(1.0)
