"""What a strategy of local steps answers; a paper's algorithm is a subclass."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    ParamSpec,
    TypeGuard,
    TypeVar,
    get_args,
)

import torch
from torch.optim import Optimizer

from pswire.limits import NUMBER_MAX, PUSH_WEIGHT_MAX
from pswire.membership import Mode
from pswire.number_range import NumberRange
from pswire.optimizers import SUPPORTED
from psworker.backends.local import LOCAL_MODE
from psworker.errors import (
    ConfigurationError,
    PsError,
    UnsupportedError,
    refuse_name,
    refuse_numbers,
)
from psworker.strategies.rounds import Progress

Tensors = Sequence[torch.Tensor]
"""Parameters of one fragment of the model, or what is computed of them, in order."""

InnerState = Literal["keep", "reset", "average"]

FragmentOrder = Literal["sequential", "strided"]

P = ParamSpec("P")
T = TypeVar("T")

RATE: Final = NumberRange(0.0, 1000.0)
"""Learning rates of outer optimizers."""

SHARE: Final = NumberRange(0.0, 1.0, is_below=True)
"""Of what stays: momentum, and what a worker keeps of its own."""

_WEIGHT: Final = NumberRange(0.0, PUSH_WEIGHT_MAX)

_MISTAKES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)
"""Of a method. A signal handler that runs meanwhile raises others, for its script."""

_NOT_DUE_TEXT: Final = (
    "{} does not say when to push: give it a method is_due(progress), as in `return "
    "progress.step_count >= 50`"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A round, and whose part in it is asked for.

    Attributes:
        clock: Clock that the round completes.
        place: The worker's place among the members, by rank, from 0 without a gap.
        worker_count: Members of the job.
    """

    clock: int
    place: int
    worker_count: int


class Strategy:
    """How a worker trains by itself for some steps, and what it shares with the job.

    A script's own optimizer takes its steps in the worker, here the *inner* one. The
    job trains the *anchor*: values of the same names and shapes, which an *outer*
    optimizer updates on the shards. After some local steps the worker pushes a tensor
    for each parameter, as if it were a gradient; the shards take their mean over the
    workers, weighted, and step the outer optimizer with it; the worker takes what it
    wants of the new anchor. By default that is local SGD, or model averaging: the
    difference from the anchor, an outer SGD of rate 1, and all of the new anchor.

    To make one, subclass this and override what differs: see docs/strategies.md.
    Methods are called in the script's thread, without gradients being recorded, and
    with the tensors of one fragment at a time.

    Attributes:
        fragment_count: In how many parts, which take turns, the model is pushed.
        fragment_order: Which layers are in one part: neighbours (`sequential`), or some
            from all over the model (`strided`).
        fragments_are_drawn: Whether their turns are drawn, so that a worker that misses
            some clocks meets all of them. Otherwise they come one after the other.
        taken_after: Local steps from a push to taking what comes back; 0 to wait for
            it within the step.
        keeps_trained: Whether what local steps have changed since a push began is added
            to what `take` takes.
        pulls_first: Whether the anchor is pulled anew just before `push` is asked.
        inner_state: What becomes of the inner optimizer's state at each round: it is
            kept, reset, or averaged over the workers. Not averaged with `taken_after`:
            the mean would put back what steps beside the push have changed, and added
            as a difference it could make Adam's second moments negative.
        shared: Names of attributes that are the same in all workers of a job, as is
            the class, and the outer optimizer with its numbers. `prepare` refuses a
            worker that has them otherwise than the job.
        modes: Modes of a job that it works in. `prepare` refuses any other; where the
            job is changed to one later on, its workers go on, with a warning.
        round_step_count: Local steps of the round under way, to show with the job; None
            where there is no such number.
    """

    fragment_count: int = 1
    fragment_order: FragmentOrder = "sequential"
    fragments_are_drawn: bool = False
    taken_after: int = 0
    keeps_trained: bool = False
    pulls_first: bool = False
    inner_state: InnerState = "keep"
    shared: ClassVar[tuple[str, ...]] = (
        "fragment_count",
        "fragment_order",
        "fragments_are_drawn",
        "inner_state",
    )
    modes: ClassVar[tuple[str, ...]] = ("bsp", "ssp", "asp")
    round_step_count: int | None = None

    def outer(self, parameters: Tensors) -> torch.optim.Optimizer:
        """The optimizer that the shards run with what is pushed.

        Args:
            parameters: Those of one fragment of the anchor.

        Returns:
            One of torch's that shards can run, as `prepare` takes it.
        """
        return torch.optim.SGD(parameters, lr=1.0)

    def is_due(self, progress: Progress) -> bool:
        """Whether to push now, after a local step."""
        raise NotImplementedError(_NOT_DUE_TEXT.format(type(self).__name__))

    def push(
        self, anchor: Tensors, local: Tensors, progress: Progress
    ) -> Sequence[torch.Tensor | None]:
        """What is pushed, in the place of a gradient; by default `anchor - local`.

        Must leave `local` as it is: it is asked again where an error, such as Ctrl-C,
        came before the push was sent, and where the job went on without the push. What
        shall move `local`, as an elastic force does, belongs into `take`.

        Args:
            anchor: The job's values, as this worker has them.
            local: The worker's own parameters.
            progress: Where the worker stands.

        Returns:
            A new tensor for each parameter, of its shape and dtype; None for one that
            is left as it is, as by an optimizer without a gradient.
        """
        return torch._foreach_sub(list(anchor), list(local))

    def outer_hyperparameters(self, progress: Progress) -> Mapping[str, float]:
        """Hyperparameters of the outer optimizer from this push on, by their names.

        Asked before each push; what is not named stays as it is. They go with the
        push. In BSP and mode quorum those of one worker count for all, so let them
        follow from what is the same in all workers, such as `progress.clock`: that is
        right in a worker that joins later, and after a return to a checkpoint.

        Args:
            progress: Where the worker stands.

        Returns:
            Numbers, such as `dict(lr=0.7 * 0.99**progress.clock)`; by default none.
        """
        return {}

    def weight(self, progress: Progress) -> float:
        """How much the push counts in a mean; by default the samples behind it."""
        return float(progress.sample_count)

    def take(self, local: Tensors, anchor: Tensors) -> None:
        """Takes what comes back into `local`, in place; by default all of `anchor`.

        Called once for each push that has counted, and a second time where an error,
        such as Ctrl-C, came within it; also after a clock in which the worker had no
        part.
        """
        torch._foreach_copy_(list(local), list(anchor))

    def before_step(self, local: Tensors, anchor: Tensors) -> None:
        """Called before each local step, when gradients are there; may change them.

        Where the step has a closure, after each of its calls.
        """

    def takes_part(self, turn: Turn) -> bool:
        """Whether a worker trains in a round, asked at its beginning, in BSP.

        By what `turn` says alone, so that all workers know the same ones. A worker
        that does not take part pushes nothing, and takes the new anchor.
        """
        return True


def terms_of(strategy: Strategy) -> str:
    """What all workers of a job have alike, in words by which they are compared.

    Raises:
        ConfigurationError: They are too long for a job, or can't be written.
    """
    shown = {name: repr(getattr(strategy, name)) for name in strategy.shared}
    values = (
        f"{name}={value}"
        for name, value in shown.items()
        if value != repr(getattr(Strategy, name, None))
    )
    terms = f"{type(strategy).__name__}({', '.join(values)})"
    cure = "have `shared` name attributes whose repr() is short and plain"
    refuse_name("strategy", terms, cure)
    return terms


def check_strategy(strategy: object) -> None:
    """Checks what a user gives as a strategy, one of their own too.

    Raises:
        ConfigurationError: It is none, or says of itself what nothing can be done with.
        UnsupportedError: What it says of itself does not go together.
    """
    if not isinstance(strategy, Strategy):
        kind = strategy if isinstance(strategy, type) else type(strategy)
        is_class = kind is strategy and issubclass(kind, Strategy)
        shown = f"the class {kind.__name__}" if is_class else repr(strategy)
        named = kind.__name__ if is_class else "DiLoCo"
        raise ConfigurationError(
            f"strategy is {shown}, which is no strategy: give an object of one, as in "
            f"strategy=psworker.{named}(every=50)"
        )
    for name, words in (("inner_state", InnerState), ("fragment_order", FragmentOrder)):
        word, known = getattr(strategy, name), get_args(words)
        if word not in known:
            raise ConfigurationError(
                f"{type(strategy).__name__} has {name}={word!r}: give "
                f"{' or '.join(map(repr, known))}"
            )
    owner = type(strategy).__name__
    refuse_numbers(
        NumberRange(1, NUMBER_MAX), owner, fragment_count=strategy.fragment_count
    )
    refuse_numbers(NumberRange(0, NUMBER_MAX), owner, taken_after=strategy.taken_after)
    shared: object = strategy.shared
    if not _are_names(shared):
        raise ConfigurationError(
            f"{owner} has shared={shared!r}: give a tuple of names of its attributes, "
            'as in shared = (*psworker.Strategy.shared, "every")'
        )
    if missing := [each for each in strategy.shared if not hasattr(strategy, each)]:
        raise ConfigurationError(
            f"{owner}.shared names {missing[0]!r}, and there is no such attribute: set "
            "it in __init__, or leave it out"
        )
    modes: object = strategy.modes
    labels = [each.label for each in Mode]
    if not _are_names(modes) or not modes or {*strategy.modes} - {*labels}:
        raise ConfigurationError(
            f"{owner} has modes={modes!r}: give a tuple of those that it works in, "
            f"from {', '.join(map(repr, labels))}"
        )
    if type(strategy).is_due is Strategy.is_due:
        raise ConfigurationError(_NOT_DUE_TEXT.format(owner))
    if strategy.inner_state == "average" and strategy.taken_after:
        raise UnsupportedError(
            'inner_state="average" would put back what steps beside the push have '
            "changed: leave it out, or take what comes back at once, taken_after=0"
        )


def _are_names(given: object) -> TypeGuard[Sequence[str]]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return False
    return all(isinstance(each, str) for each in given)


def answer_of(method: Callable[P, T | None], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a strategy decides, which a user may have written.

    Raises:
        ConfigurationError: It has a mistake, or returns nothing.
    """
    cause: Exception | None = None
    try:
        if (answer := method(*args, **kwargs)) is not None:
            return answer
        problem = "returned None"
    except PsError:
        raise
    except _MISTAKES as error:
        problem, cause = f"raised {type(error).__name__}: {error}", error
    raise ConfigurationError(
        f"{getattr(method, '__qualname__', method)}() {problem}. Nothing was pushed, "
        "and nothing that was trained is lost: see psworker.Strategy for what the "
        "method has to return"
    ) from cause


def weight_of(strategy: Strategy, progress: Progress) -> float:
    """How much a push counts.

    Raises:
        ConfigurationError: As `answer_of`, or it is no weight.
    """
    weight = answer_of(strategy.weight, progress)
    refuse_numbers(_WEIGHT, f"{type(strategy).__name__}.weight()", weight=weight)
    return float(weight)


def outer_of(strategy: Strategy, parameters: list[torch.Tensor]) -> Optimizer:
    """The outer optimizer of a fragment.

    Raises:
        ConfigurationError: As `answer_of`, or it is none, or of other parameters.
    """
    outer: object = answer_of(strategy.outer, parameters)
    if not isinstance(outer, Optimizer):
        shown = f"the class {outer.__name__}" if isinstance(outer, type) else outer
        found = f"{shown}, which is no optimizer"
    else:
        held = {id(each) for group in outer.param_groups for each in group["params"]}
        if held == {id(each) for each in parameters}:
            return outer
        found = (
            f"a {type(outer).__name__} of {len(held)} parameters, and there are "
            f"{len(parameters)}"
        )
    raise ConfigurationError(
        f"outer(parameters) of {type(strategy).__name__} returned {found}: have it "
        "return one of all that it is given, such as torch.optim.SGD(parameters, "
        "lr=0.7)"
    )


def check_outer(
    strategy: Strategy, kind: type[Optimizer], group: Mapping[str, Any]
) -> None:
    """Has the class of an outer optimizer check the hyperparameters of a push.

    Args:
        strategy: Who says them.
        kind: The class.
        group: The hyperparameters, all that a group of it has.

    Raises:
        ConfigurationError: The class refuses them.
    """
    # A script's own class may take no numbers, and pass its own on.
    kind = next((each for each in kind.__mro__ if each.__name__ in SUPPORTED), kind)
    taken = inspect.signature(kind).parameters.keys() & group.keys() - {"params"}
    try:
        kind([torch.empty(0)], **{name: group[name] for name in taken})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"outer_hyperparameters() of {type(strategy).__name__} returned numbers "
            f"that {kind.__name__} refuses: {error}. Nothing was pushed, and nothing "
            "that was trained is lost: have it return what the optimizer takes"
        ) from None


def mode_problem(strategy: Strategy, mode: str) -> str:
    """Why a strategy does not work in a mode, and what to do; empty if it does."""
    if mode in (*strategy.modes, LOCAL_MODE, ""):
        return ""
    first, wanted = strategy.modes[0], " or ".join(strategy.modes)
    return (
        f"{type(strategy).__name__} works in a job in mode {wanted}, and this one is "
        f"in {mode}: start it with --mode {first}, or change it with psctl mode {first}"
    )
