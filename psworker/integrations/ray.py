"""Ray: shards and workers of a job as actors, on as many machines as its cluster has.

def train():
    with psworker.connect() as ps:
        ...
    return accuracy

ray.init()
accuracies = launch(train, workers=8, shards=2, checkpoint_dir="s3://bucket/run")
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pswire.exit_codes import exit_code_of_return_code
from pswire.tether import tethered

Result = TypeVar("Result")

_CREDENTIALS: Final = ("PS_TLS_", "PS_TOKEN")
"""What the variables begin with by which processes prove themselves: actors get those
that this process has. The files that they name must be on all machines."""

_CPU: Final = {"CPU": 1.0}
_END_TIMEOUT_S: Final = 75.0
"""A coordinator may take a minute for its last checkpoint."""


class LaunchError(RuntimeError):
    """The cluster has no room for a job, or one of its daemons has ended."""


def launch(
    train: Callable[[], Result],
    *,
    workers: int,
    shards: int = 1,
    options: Sequence[str] = (),
    shard_options: Sequence[str] = (),
    checkpoint_dir: str | None = None,
    worker_resources: Mapping[str, float] = _CPU,
    shard_resources: Mapping[str, float] = _CPU,
    strategy: str = "SPREAD",
    max_restarts: int = 3,
    timeout_s: float = 300.0,
) -> list[Result]:
    """Trains in a job of its own, and returns when all workers have.

    The coordinator runs beside the caller. Each shard and each worker is an actor, with
    resources that are reserved for all of them at once. Ray starts those that are lost
    again, on another machine where theirs is gone: a worker takes its place in the job
    again, and calls `train` anew; a shard has the job return to its newest checkpoint.

    Args:
        train: Called in each worker; `psworker.connect()` in it finds the job. It must
            be picklable by Ray.
        workers: How many; also the job's `--min-workers`, unless `options` name it.
        shards: How many.
        options: What else `psserver coordinator --help` offers, such as `--mode=ssp`.
            Beyond one machine `--insecure`, or variables of TLS, are needed.
        shard_options: The same, of `psserver shard --help`.
        checkpoint_dir: Folder or URL that all machines see. Without one a lost shard
            ends the job.
        worker_resources: What Ray reserves for each worker, such as `{"GPU": 1}`.
        shard_resources: The same, for each shard.
        strategy: How Ray places them: `SPREAD`, `PACK`, or strictly so.
        max_restarts: How often each of them is started again; -1 for any number.
        timeout_s: Longest wait for the resources, in seconds.

    Returns:
        What each worker's `train` has returned, in the order of their numbers.

    Raises:
        LaunchError: The resources can't be had, or a daemon has ended.
        ray.exceptions.RayError: `train` has raised an error, or a worker or shard was
            lost more often than it may be.
    """
    bundles = [dict(shard_resources)] * shards + [dict(worker_resources)] * workers
    of_coordinator = [f"--shards={shards}", f"--min-workers={workers}"]
    if checkpoint_dir is not None:
        of_coordinator.append(f"--checkpoint-dir={checkpoint_dir}")
    of_shards = [each for each in options if each == "--insecure"]
    group = placement_group(bundles, strategy=strategy)
    try:
        _wait_placed(group, timeout_s)
        return _train(
            train,
            _Actors(group, max_restarts),
            worker_count=workers,
            options=[*of_coordinator, *options],
            shard_options=[*of_shards, *shard_options],
        )
    finally:
        ray.util.remove_placement_group(group)


def _train(
    train: Callable[[], Result],
    actors: "_Actors",
    *,
    worker_count: int,
    options: Sequence[str],
    shard_options: Sequence[str],
) -> list[Result]:
    with ExitStack() as stack:
        stack.callback(actors.end)
        coordinator = _Daemon(
            "coordinator",
            stack.enter_context(tempfile.TemporaryDirectory(prefix="paramserver-")),
            f"--listen={ray.util.get_node_ip_address()}:0",
            *options,
        )
        # Before its shards are, which make its last checkpoint.
        stack.callback(coordinator.stop)
        actors.variables["PS_COORDINATOR"] = coordinator.address
        serving = [
            actors.start(_Shard).serve.remote(index, shard_options)
            for index in range(actors.count - worker_count)
        ]
        trained = [
            actors.start(_Worker).train.remote(f"r{index}", train)
            for index in range(worker_count)
        ]
        _wait_trained(trained, serving, coordinator)
        results: list[Result] = ray.get(trained)
        return results


def _wait_placed(group: PlacementGroup, timeout_s: float) -> None:
    if group.wait(timeout_s):
        return
    raise LaunchError(
        f"the cluster has had no room for a job within {timeout_s:g} s: it needs "
        f"{group.bundle_specs}, and of {ray.cluster_resources()} these are free: "
        f"{ray.available_resources()}; ask for less, or add machines"
    )


def _wait_trained(
    trained: list[ray.ObjectRef], serving: list[ray.ObjectRef], coordinator: "_Daemon"
) -> None:
    """Returns when all workers have trained, and raises what has ended the job."""
    waiting = list(trained)
    while waiting:
        ended, _ = ray.wait([*waiting, *serving], timeout=1.0)
        for each in ended:
            code = ray.get(each)  # raises what it has raised
            if each in serving:
                raise LaunchError(
                    f"shard {serving.index(each)} ended with exit code {code}: see "
                    "its log"
                )
            waiting.remove(each)
        if (code := coordinator.code()) is not None:
            raise LaunchError(
                f"the coordinator ended with exit code {code}: see its log"
            )


class _Actors:
    """The actors of a job, each in a bundle of its placement group.

    Attributes:
        count: How many there will be.
        variables: Of their processes.
    """

    def __init__(self, group: PlacementGroup, max_restarts: int) -> None:
        self._group = group
        self._max_restarts = max_restarts
        self._started: list[Any] = []
        self.count = len(group.bundle_specs)
        self.variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_CREDENTIALS)
        }

    def start(self, kind: Any) -> Any:  # noqa: ANN401, as Ray has them
        """Starts one in the next bundle."""
        bundle = len(self._started)
        resources = dict(self._group.bundle_specs[bundle])
        actor = kind.options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=self._max_restarts,
            max_task_retries=self._max_restarts,
            runtime_env={"env_vars": self.variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
        ).remote()
        self._started.append(actor)
        return actor

    def end(self) -> None:
        for each in self._started:
            ray.kill(each)


class _Daemon:
    """A `psserver` that ends with this process."""

    def __init__(self, role: str, state_dir: str, *arguments: str) -> None:
        """Starts it, and waits until it listens.

        Raises:
            LaunchError: It has ended.
        """
        self._process = subprocess.Popen(
            [
                *tethered(signal.SIGKILL),
                *(sys.executable, "-m", "psserver", role),
                *(f"--state-dir={state_dir}", *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().rpartition(" ")[2].strip()
        if not self.address:
            raise LaunchError(
                f"the {role} did not start: exit code {self.wait()}, see its log"
            )

    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        code = self._process.poll()
        return None if code is None else exit_code_of_return_code(code)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return exit_code_of_return_code(self._process.wait())

    def stop(self) -> None:
        """Ends it, after a last checkpoint."""
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@ray.remote
class _Shard:
    """A shard; without state of its own, as a start on another machine has none."""

    def serve(self, index: int, options: Sequence[str]) -> int:
        with tempfile.TemporaryDirectory(prefix="paramserver-") as folder:
            return _Daemon(
                "shard",
                folder,
                f"--coordinator={os.environ['PS_COORDINATOR']}",
                f"--listen={ray.util.get_node_ip_address()}:0",
                f"--index={index}",
                *options,
            ).wait()


@ray.remote
class _Worker:
    """A process that trains."""

    def train(self, worker_id: str, function: Callable[[], Result]) -> Result:
        os.environ["PS_WORKER_ID"] = worker_id
        return function()
