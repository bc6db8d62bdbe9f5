"""What workers are to be told of hyperparameters that do not count."""

from collections.abc import Collection

from psserver.shard.core.effects import HyperparametersDiffer
from pswire.membership import WorkerKey


class DifferingWorkers:
    """Differences until the next reply to the worker whose values do not count."""

    def __init__(self) -> None:
        self._untold: dict[WorkerKey, HyperparametersDiffer] = {}

    def note(self, difference: HyperparametersDiffer) -> None:
        """A worker carries other values than those used."""
        self._untold[difference.other] = difference

    def take(self, worker: WorkerKey) -> HyperparametersDiffer | None:
        """What the next reply to a worker tells; no later one does."""
        return self._untold.pop(worker, None)

    def keep_only(self, members: Collection[WorkerKey]) -> None:
        """Forgets workers that are no members any more."""
        for worker in self._untold.keys() - set(members):
            del self._untold[worker]
