"""What `psctl compare --strategies` reads, counts and writes."""

import json
from pathlib import Path

import pytest
import torch

from psctl.compare.characters import CONTEXT, Characters
from psctl.compare.job import read_line
from psctl.compare.loads import Load
from psctl.compare.modes import parse_mode
from psctl.compare.picture import draw_strategies, loss_limits
from psctl.compare.strategies import Contender, parse_contenders
from psctl.compare.strategy_runs import (
    LinkSpeed,
    Point,
    StrategyFigures,
    StrategyRun,
    figures_of,
    parse_link,
)
from psctl.compare.with_strategies import (
    StrategyComparison,
    StrategySettings,
    strategies_json,
    strategies_text,
)
from psctl.failures import CommandError
from psworker.strategies.diloco import DiLoCo
from psworker.strategies.downpour import Downpour
from psworker.strategies.pace import Fixed, ShareOfTime
from tests.doubles.installed import need


def test_contenders_are_read_as_they_are_named() -> None:
    found = parse_contenders(
        "bsp+int8, bsp+1,diloco:50:lr=0.5+int8@ssp:3,diloco:10%,downpour:5,quorum", 5
    )
    plain, backup, full, share, downpour, quorum = found
    assert (plain.strategy, plain.compression) == ("", "int8")
    assert plain.mode.name == "bsp"
    assert backup.mode.coordinator_options() == ["--backup-workers", "1"]
    assert backup.compression == ""
    assert full == Contender(
        name="diloco:50:lr=0.5+int8@ssp:3",
        mode=parse_mode("ssp:3", 5),
        strategy="diloco",
        every=50,
        compression="int8",
        options={"lr": 0.5},
    )
    assert (share.every, share.share) == (None, 0.1)
    assert (downpour.every, downpour.mode.name) == (5, "asp")
    assert quorum.mode.coordinator_options() == ["--quorum", "3"]
    assert quorum.mode.label == "quorum of 3"


def test_strategies_are_made_as_they_are_named() -> None:
    text = (
        "bsp,diloco:50:lr=0.5,diloco:10%,downpour:5,streaming-diloco:40:taken_after=9"
    )
    plain, diloco, share, downpour, streaming = (
        each.made() for each in parse_contenders(text, 4)
    )
    assert plain is None
    assert isinstance(diloco, DiLoCo)
    assert diloco.pace == Fixed(50)
    parameter = torch.zeros(1, requires_grad=True)
    assert diloco.outer([parameter]).param_groups[0]["lr"] == 0.5
    assert isinstance(share, DiLoCo)
    assert share.pace == ShareOfTime(0.1)
    assert isinstance(downpour, Downpour)
    assert downpour.pace == Fixed(5)
    assert streaming is not None
    assert streaming.taken_after == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bsp,gossip:5", "'gossip:5' is no strategy.* diloco, streaming-diloco"),
        ("diloco:0", "'diloco:0' is no strategy"),
        ("diloco:100%", "is no strategy"),
        ("diloco:5@gossip", "'gossip' is no mode"),
        ("downpour:5@bsp", "downpour works in mode ssp or asp, not in bsp"),
        ("diloco:5:speed=3", "'diloco:5:speed=3' can't be made: .*'speed'"),
        ("streaming-diloco:5:taken_after=9", "can't be made: taken_after=9 is not"),
        ("fedavg", "'fedavg' can't be made: .*'every'"),
        ("diloco+zip", r"'diloco\+zip' compresses in no way.* int8"),
        ("bsp,bsp", "twice"),
        ("quorum:5", "no quorum of 4 workers"),
        ("bsp+4", "more workers than the 4"),
    ],
)
def test_other_contenders_are_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_contenders(text, 4)


def test_links_are_read() -> None:
    assert parse_link("50mbit,20ms") == LinkSpeed(50.0, 20.0)
    assert parse_link("1.5Gbit") == LinkSpeed(1500.0)
    assert parse_link("50mbit, 20ms").text == "50 Mbit/s and 20 ms each way"
    for text in ("", "50", "0mbit", "fast", "50mbit,20"):
        with pytest.raises(ValueError, match="is no link: give a speed"):
            parse_link(text)


def _run(name: str, load: Load = Load.EVEN) -> StrategyRun:
    (contender,) = parse_contenders(name, 2)
    return StrategyRun(
        contender=contender,
        load=load,
        worker_count=2,
        batch_size=8,
        sample_count=160,
        base_s=0.01,
        seed=1,
    )


def _point(worker_index: int, at_s: float, samples: int, **changes: int) -> Point:
    values = {"sent_bytes": 10 * samples, "received_bytes": samples, **changes}
    return Point(
        worker_index=worker_index,
        at_s=at_s,
        step_count=samples // 8,
        sample_count=samples,
        clock=values.pop("clock", samples // 16),
        **values,
    )


POINTS = [
    *(_point(0, 100.0, 0), _point(0, 102.0, 40), _point(0, 104.0, 80)),
    *(_point(1, 101.0, 0), _point(1, 103.0, 60), _point(1, 105.0, 80, clock=9)),
]


def _figures(name: str, *losses: float, load: Load = Load.EVEN) -> StrategyFigures:
    timed = [(100.5 + 2 * number, loss) for number, loss in enumerate(losses)]
    return figures_of(_run(name, load), POINTS, timed)


def test_a_run_is_counted_from_its_first_step_to_the_end_of_its_last_worker() -> None:
    found = _figures("diloco:50", 4.0, 3.0, 2.0)
    assert found.duration_s == 5.0
    assert (found.sample_count, found.samples_per_s) == (160, 32.0)
    assert (found.sent_bytes, found.received_bytes) == (1600, 160)
    assert (found.byte_count, found.exchange_count) == (1760, 9)
    assert [(p.at_s, p.sample_count, p.loss) for p in found.curve] == [
        (0.5, 0, 4.0),
        (2.5, 40, 3.0),
        (5.0, 160, 2.0),  # the last one is that of the end, whenever it was read
    ]
    assert found.curve[1].byte_count == 440
    assert found.first_at_s(3.0) == 2.5
    assert found.first_at_s(1.9) is None


def test_snapshots_from_before_and_after_a_run_are_left_out() -> None:
    found = figures_of(_run("bsp"), POINTS, [(99.0, 5.0), (106.0, 1.0), (107.0, 2.0)])
    assert [each.loss for each in found.curve] == [2.0]


def test_a_line_and_an_argument_are_read_as_they_were_written() -> None:
    assert read_line(Point, POINTS[1].to_line()) == POINTS[1]
    for name in ("bsp", "diloco:10%:lr=0.5+int8@ssp:3", "quorum:1"):
        run = _run(name, Load.STRAGGLER)
        assert StrategyRun.from_argument(run.to_argument()) == run
    with pytest.raises(CommandError, match="a worker printed 'what'"):
        read_line(Point, "what")


def _comparison(tmp_path: Path) -> StrategyComparison:
    names = "bsp,diloco:50"
    settings = StrategySettings(
        contenders=parse_contenders(names, 2),
        loads=(Load.EVEN, Load.STRAGGLER),
        link=LinkSpeed(50.0, 20.0),
        worker_count=2,
        sample_count=160,
        batch_size=8,
        base_ms=10.0,
        seed=1,
        snapshot_interval_s=1.0,
        out=tmp_path,
    )
    figures = tuple(
        _figures(name, 4.0, 2.1, end, load=load)
        for load in settings.loads
        for name, end in (("bsp", 2.0), ("diloco:50", 2.03))
    )
    return StrategyComparison(settings=settings, base_s=0.01, figures=figures, files=())


def test_each_is_held_beside_the_first_of_its_load(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path)
    text = strategies_text(comparison)
    assert "50 Mbit/s and 20 ms each way" in text
    assert "STRAGGLER: one worker" in text
    assert "TO 2.040" in text
    (line,) = {each for each in text.splitlines() if each.endswith("  diloco:50")}
    assert line.split()[-7:-1] == ["1.0", "2.030", "+1.5", "%", "5.0", "s"]
    assert max(map(len, text.splitlines())) <= 100
    document = strategies_json(comparison)
    json.dumps(document)
    runs = document["runs"]
    assert isinstance(runs, list)
    assert [(run["load"], run["strategy"]) for run in runs] == [
        *(("even", "bsp"), ("even", "diloco:50")),
        *(("straggler", "bsp"), ("straggler", "diloco:50")),
    ]
    assert runs[1]["final_loss_over_first"] == 1.015
    assert runs[1]["target_s"] == 5.0
    assert runs[1]["curve"][-1] == [5.0, 160, 1760, 2.03]


def test_the_picture_is_of_losses_that_can_be_told_apart(tmp_path: Path) -> None:
    need("matplotlib", "pip install 'paramserver[plot]'")
    comparison = _comparison(tmp_path)
    path = draw_strategies(comparison.figures, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    curves = [each.curve for each in comparison.figures]
    assert loss_limits(curves) == pytest.approx((1.96, 3.0))
    diverged = [*curves, _figures("diloco:50", 4.0, 9.0).curve]
    assert loss_limits(diverged)[1] == pytest.approx(9.45)


def test_every_worker_has_the_same_samples_of_the_text_that_is_not_held_out() -> None:
    text = Characters()
    first, again = (text.samples(5, seed=3).tensors for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    characters, following = first
    assert characters.shape == following.shape == (5, CONTEXT)
    assert (characters[:, 1:] == following[:, :-1]).all()
    model = text.new_model()
    assert 4.0 < text.held_out_loss(model) < 6.0  # near log(103)
    other = text.new_model()
    assert all(
        (a == b).all()
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
