"""The commands of `psctl` that run whole jobs on this machine."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psctl.compare.attacks import EXAMPLES as ATTACKS
from psctl.options import (
    JsonOption,
    StalenessOption,
    interruptible,
    parsed,
    say,
    show,
)
from pswire.limits import NUMBER_MAX, STALENESS_BOUND_DEFAULT
from pswire.membership import BOUNDED_MODES, Mode
from pswire.number_range import NumberRange
from pswire.options import MODES_TEXT, choice_option, count_option, number_option

if TYPE_CHECKING:
    from psctl.compare.loads import Load


class DemoData(StrEnum):
    DIGITS = "digits"
    MNIST5K = "mnist5k"


def demo(
    *,
    data: Annotated[
        DemoData, choice_option(DemoData, help="What to train on: both are real data.")
    ] = DemoData.DIGITS,
    workers: Annotated[int, count_option("Workers.", most=64)] = 3,
    shards: Annotated[int, count_option("Shards.", most=64)] = 2,
    epochs: Annotated[
        int | None,
        count_option("Epochs; by default about ten seconds of them.", most=1_000_000),
    ] = None,
    mode: Annotated[
        str,
        choice_option(
            Mode.labels(),
            help=f"How workers keep together: {MODES_TEXT}.",
        ),
    ] = Mode.BSP.label,
    staleness: StalenessOption = None,
    kill: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE-INDEX@STEP",
            help="Kill a process with SIGKILL at a step, and report what follows: "
            "worker-1@40, coordinator@40 or shard-0@40.",
        ),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="With TLS and a token for each role, made for this demo.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="File or folder for the snapshot; by default "
            "./paramserver-demo.safetensors.",
        ),
    ] = None,
) -> None:
    """Trains a real model on real data with a whole job here.

    Example: psctl demo --data mnist5k --workers 4

    Example: psctl demo --mode ssp --kill worker-1@40

    Needs no network beyond loopback. Ctrl-C ends it and leaves nothing behind.
    """
    from psctl.demo.kill import parse_kill

    if staleness is not None and not Mode.labelled(mode).rules.takes_bound:
        raise typer.BadParameter(
            f"only --mode {BOUNDED_MODES} has a bound, not {mode}",
            param_hint="--staleness",
        )
    death = kill and parsed(
        "--kill", lambda: parse_kill(kill, worker_count=workers, shard_count=shards)
    )
    from psctl.demo.command import JobPlan, run_demo

    plan = JobPlan(
        task_name=data.value,
        worker_count=workers,
        shard_count=shards,
        epoch_count=epochs or 0,
        mode=mode,
        staleness_bound=STALENESS_BOUND_DEFAULT if staleness is None else staleness,
        kill=death or None,
        is_secure=secure,
    )
    with interruptible():
        typer.echo(run_demo(plan, out))


def compare(
    *,
    workers: Annotated[
        int | None,
        count_option("Workers; 4, with --attack 8 by default.", most=64),
    ] = None,
    samples: Annotated[
        int | None,
        count_option(
            "Samples in updates, the same for each run; 25,600 by default, with "
            "--attack 153,600, with --strategies 128,000.",
            most=1_000_000_000,
        ),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(metavar="LIST", help="Any of bsp, bsp+B, ssp:S and asp."),
    ] = "bsp,bsp+1,ssp:3,asp",
    loads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Any of hiccups, straggler and even; the first two by default, with "
            "--strategies even.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Holds ways to train beside the first of them, on the same samples: "
            "modes (bsp, ssp:3, asp, quorum:2) and strategies (diloco:50), compressed "
            "(bsp+int8) or not.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED[,LATENCY]",
            help="With --strategies, the link of each worker, in each direction, such "
            "as 50mbit,20ms; by default that of this machine.",
        ),
    ] = None,
    batch: Annotated[
        int,
        count_option("With --strategies, samples of a worker's step.", most=1_000_000),
    ] = 16,
    attack: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Compares rules of aggregation in place of modes. Some workers (2 by "
            f"default) send wrong gradients, with commas between: {ATTACKS}.",
        ),
    ] = None,
    rules: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="With --attack, rules of aggregation with spaces between; all of them "
            "by default, for 2 bad workers of 8.",
            show_default=False,
        ),
    ] = "mean median trimmed-mean:0.25 krum:f=2 multi-krum:f=2",
    base_ms: Annotated[
        float | None,
        number_option(
            allowed=NumberRange(1.0, 3_600_000.0),
            metavar="MS",
            help="How long an undisturbed step takes; by default 100, or more where "
            "that is not long against the step's own work. With --strategies at least, "
            "and by default what its work takes when all workers share the cores.",
        ),
    ] = None,
    target: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.0, 1.0), help="Accuracy whose time is reported."
        ),
    ] = 0.9,
    seed: Annotated[
        int, count_option("Seed of data and delays.", most=NUMBER_MAX, least=0)
    ] = 1,
    snapshot_interval: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.05, 3_600.0, unit="seconds"),
            metavar="SECONDS",
            help="Between points of the curve.",
        ),
    ] = 1.0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for CSV files and picture.")
    ] = Path("paramserver-compare"),
    as_json: JsonOption = False,
) -> None:
    """Compares modes, strategies or rules of aggregation.

    Example: psctl compare --modes bsp,ssp:3,ssp:8 --loads hiccups

    By default it shows what BSP, backup workers, SSP and ASP are good for: trains the
    convolutional network of `psctl demo` once for each mode and load, with workers
    whose steps are waits of a set length, hiccups and stragglers among them. Takes
    about 8 minutes. docs/modes.md says what to expect and why.

    With --attack it shows what rules of aggregation do against workers that do harm:
    psctl compare --attack sign-flip,scale,constant (docs/robustness.md).

    With --strategies it trains a character transformer by local steps, and by a push at
    each step: psctl compare --strategies bsp,diloco:50 --link 50mbit,20ms
    (docs/strategies.md).
    """
    chosen = [o for o, v in (("--attack", attack), ("--strategies", strategies)) if v]
    if len(chosen) > 1:
        raise typer.BadParameter(
            f"{' and '.join(chosen)} are comparisons of their own: give one of them",
            param_hint=chosen[1],
        )
    if link is not None and strategies is None:
        raise typer.BadParameter(
            "only --strategies are compared on a link", param_hint="--link"
        )
    if attack is not None:
        _compare_under_attack(
            attack,
            rules,
            worker_count=workers or 8,
            sample_count=samples or 153_600,
            seed=seed,
            snapshot_interval_s=snapshot_interval,
            out=out,
            as_json=as_json,
        )
        return
    from psctl.compare.loads import parse_loads

    worker_count = workers or 4
    if loads is None:
        loads = "hiccups,straggler" if strategies is None else "even"
    parsed_loads = parsed("--loads", lambda: parse_loads(loads))
    if strategies is not None:
        _compare_strategies(
            strategies,
            parsed_loads,
            link=link,
            batch_size=batch,
            worker_count=worker_count,
            sample_count=samples or 128_000,
            base_ms=base_ms,
            seed=seed,
            snapshot_interval_s=snapshot_interval,
            out=out,
            as_json=as_json,
        )
        return
    from psctl.compare.command import run_comparison
    from psctl.compare.modes import parse_modes
    from psctl.compare.report import CompareSettings, comparison_json, comparison_text

    settings = CompareSettings(
        modes=parsed("--modes", lambda: parse_modes(modes, worker_count)),
        loads=parsed_loads,
        worker_count=worker_count,
        sample_count=samples or 25_600,
        base_ms=base_ms,
        target_accuracy=target,
        seed=seed,
        snapshot_interval_s=snapshot_interval,
        out=out,
    )
    with interruptible():
        comparison = run_comparison(settings, say)
    show(as_json, comparison_json(comparison), comparison_text(comparison))


def _compare_under_attack(
    attack: str,
    rules: str,
    *,
    worker_count: int,
    sample_count: int,
    seed: int,
    snapshot_interval_s: float,
    out: Path,
    as_json: bool,
) -> None:
    from psctl.compare.attacks import parse_attacks, parse_rules
    from psctl.compare.under_attack import (
        AttackSettings,
        attacks_json,
        attacks_text,
        run_attacks,
    )

    of_attacks = AttackSettings(
        attacks=parsed("--attack", lambda: parse_attacks(attack, worker_count)),
        rules=parsed("--rules", lambda: parse_rules(rules, worker_count)),
        worker_count=worker_count,
        sample_count=sample_count,
        seed=seed,
        snapshot_interval_s=snapshot_interval_s,
        out=out,
    )
    with interruptible():
        attacked = run_attacks(of_attacks, say)
    show(as_json, attacks_json(attacked), attacks_text(attacked))


def _compare_strategies(
    strategies: str,
    loads: "tuple[Load, ...]",
    *,
    link: str | None,
    batch_size: int,
    worker_count: int,
    sample_count: int,
    base_ms: float | None,
    seed: int,
    snapshot_interval_s: float,
    out: Path,
    as_json: bool,
) -> None:
    from psctl.compare.strategies import parse_contenders
    from psctl.compare.strategy_runs import parse_link
    from psctl.compare.with_strategies import (
        StrategySettings,
        run_strategies,
        strategies_json,
        strategies_text,
    )

    of_strategies = StrategySettings(
        contenders=parsed(
            "--strategies", lambda: parse_contenders(strategies, worker_count)
        ),
        loads=loads,
        link=None if link is None else parsed("--link", lambda: parse_link(link)),
        worker_count=worker_count,
        sample_count=sample_count,
        batch_size=batch_size,
        base_ms=base_ms,
        seed=seed,
        snapshot_interval_s=snapshot_interval_s,
        out=out,
    )
    with interruptible():
        trained = run_strategies(of_strategies, say)
    show(as_json, strategies_json(trained), strategies_text(trained))
