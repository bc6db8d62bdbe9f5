"""The page of a job, in a real Chromium."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from psserver.config import ListenConfig
from pswire.membership import Mode, ModeTerms, WorkerState
from pswire.security.roles import Role
from tests.doubles.free_addresses import free_address
from tests.doubles.installed import HEAVY, need
from tests.doubles.job_tokens import JobTokens
from tests.doubles.made_documents import MadeJob
from tests.integration.job import Crew, Job, connect

need("playwright", HEAVY)
from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import (  # noqa: E402
    Browser,
    BrowserContext,
    Locator,
    Page,
    Route,
    expect,
)

from tests.doubles.served_page import ServedPage, chromium  # noqa: E402

# Of the first one: Chromium may have to be installed.

LIMIT_MS: Final = 60_000
"""Longest wait for anything that the page shows."""

HOSTILE: Final = (
    '<img src=x onerror="window.isTaken=1">\'"><svg onload=window.isTaken=1>'
)
REVERSED: Final = "\u202eevil\u202c"

PACE_S: Final = 0.01
"""Of a step: the job and the browser's driver are threads of one process."""

OpenPage = Callable[..., Page]


@dataclass
class Guarded:
    """A job that asks for tokens, and its page."""

    job: Job
    tokens: JobTokens
    url: str

    def token(self, role: Role) -> str:
        return self.tokens.path(role.value).read_text()

    def mode_is(self, mode: Mode, bound: int) -> bool:
        return self.job.ask(
            lambda: self.job.coordinator.core.mode_is(ModeTerms(mode, bound))
        )

    def post(self, action: str, token: str, body: bytes) -> tuple[int, str]:
        """Status and text of the answer."""
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(
            f"{self.url}actions/{action}", body, headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_MS / 1000) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, str(json.loads(error.read())["error"])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        expect.set_options(timeout=LIMIT_MS)
        yield started


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages; none may have raised, or tried what its policy forbids."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def open_page(url: str, **settings: Any) -> Page:  # noqa: ANN401, of Playwright
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda each: problems.append(each.text))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # What is not answered, the browser logs by itself.
    assert [each for each in problems if not each.startswith("Failed to load")] == []


def workers(count: int, prefix: str = "w") -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]


def is_live(page: Page) -> None:
    expect(page.locator("#link")).to_have_text("live")


def tiles_of(page: Page) -> Locator:
    return page.get_by_role("listbox", name="Workers").get_by_role("option")


# The whole of it


def train(job: Job, worker_id: str, enough: threading.Event) -> None:
    with connect(job, worker_id) as ps:
        model: nn.Module = nn.Linear(8, 4)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = ps.prepare(model, optimizer)
        while not enough.is_set() or ps.clock % 50:
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            time.sleep(PACE_S)
            optimizer.step()
            optimizer.zero_grad()
            ps.log(loss=loss)


@contextmanager
def training(job: Job, *worker_ids: str) -> Iterator[None]:
    """Has workers train meanwhile."""
    enough = threading.Event()
    with Crew(dict.fromkeys(worker_ids, lambda each: train(job, each, enough))) as crew:
        try:
            yield
        finally:
            enough.set()
        crew.results()


def test_it_shows_a_job_and_goes_on_after_a_restart_of_its_coordinator(
    tmp_path: Path, open_page: OpenPage
) -> None:
    address = free_address()
    admin = ListenConfig(address=address).admin(address)
    with Job(tmp_path, workers_min=2, admin=admin) as job, training(job, "w0", "w1"):
        page = open_page(f"http://{address}/")
        is_live(page)
        job_id = job.ask(lambda: job.coordinator.core.settings.job_id)
        expect(page.locator("#job-id")).to_have_text(job_id)
        expect(page.locator("#cause")).to_have_text("Training")
        workers = page.locator("#worker-table tbody tr")
        expect(workers).to_have_count(2)
        expect(workers.nth(0)).to_contain_text("training")
        expect(page.locator("#shard-table tbody tr")).to_have_count(2)
        events = page.locator("#event-table")
        expect(events).to_contain_text("worker joined")
        page.get_by_label("Throughput").select_option("steps/s")
        for chart in ("metric", "rate"):
            line = page.locator(f"#{chart}-chart .line")
            expect(line).to_have_attribute("d", re.compile("L"))

        job.stop_coordinator()
        away = page.locator("#away")
        expect(away).to_contain_text("has not answered since")
        expect(workers).to_have_count(2)
        job.start_coordinator()
        job.wait_workers(2, WorkerState.MEMBER)
        is_live(page)
        expect(away).to_be_hidden()
        expect(events.get_by_text("coordinator started")).to_have_count(2)
        expect(page.locator("#cause")).to_have_text("Training")

        # Nobody is known for an admin in a job without tokens.
        page.get_by_label("Token", exact=True).fill("any")
        page.get_by_role("button", name="Use this token").click()
        expect(page.locator("#outcome")).to_contain_text("the job has no tokens")
        expect(page.locator("#actions")).to_be_hidden()


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    """A job of one worker that asks whoever calls for a token."""
    tokens = JobTokens(tmp_path)
    monkeypatch.setenv("PS_TOKEN_FILE", str(tokens.path(Role.WORKER.value)))
    address = free_address()
    admin = ListenConfig(address=address, tokens=tokens.store).admin(address)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with (
        Job(
            tmp_path,
            shard_count=1,
            sockets=True,
            tokens=tokens,
            admin=admin,
            mode=Mode.ASP,
            checkpoint_url=str(folder),
        ) as job,
        training(job, "w0"),
    ):
        job.wait_workers(1, WorkerState.MEMBER)
        yield Guarded(job, tokens, f"http://{address}/")


def test_only_a_token_of_role_admin_changes_anything(
    guarded: Guarded, open_page: OpenPage
) -> None:
    page = open_page(guarded.url)
    outcome = page.locator("#outcome")

    def use(token: str) -> None:
        page.get_by_label("Token", exact=True).fill(token)
        page.get_by_role("button", name="Use this token").click()

    expect(page.locator("#link")).to_have_text("needs a token")
    expect(page.locator("#workers")).to_be_hidden()
    use("x" * 43)
    expect(outcome).to_contain_text("missing or invalid token")
    expect(page.locator("#link")).to_have_text("needs a token")

    use(guarded.token(Role.READER))
    is_live(page)
    expect(outcome).to_contain_text("role reader")
    expect(page.locator("#actions")).to_be_hidden()

    use(guarded.token(Role.ADMIN))
    page.get_by_role("button", name="Save a checkpoint").click()
    expect(outcome).to_contain_text("is complete: clock")
    expect(page.locator("#checkpoint")).to_contain_text("ago")
    change = page.get_by_role("button", name="Change the mode")
    page.get_by_label("Change it to").select_option("ssp")
    page.get_by_label("Staleness").fill("7")
    change.click()
    page.get_by_role("button", name="Leave it").click()
    assert guarded.mode_is(Mode.ASP, 0)
    change.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("from asp to ssp, at most 7 clocks apart")
    dialog.get_by_role("button", name="Change the mode").click()
    expect(outcome).to_contain_text("The mode is ssp")
    assert guarded.mode_is(Mode.SSP, 7)

    # It is in memory alone.
    page.reload()
    expect(page.locator("#link")).to_have_text("needs a token")


def test_a_refusal_that_comes_late_leaves_the_new_token(
    guarded: Guarded, open_page: OpenPage
) -> None:
    """As on a slow link: a token is given while an answer is under way."""
    page = open_page(guarded.url)
    expect(page.locator("#link")).to_have_text("needs a token")
    held: list[Route] = []

    def hold_first(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    page.route("**/status", hold_first)
    with page.expect_request("**/status"):
        pass
    page.get_by_label("Token", exact=True).fill(guarded.token(Role.READER))
    page.get_by_role("button", name="Use this token").click()
    expect(page.locator("#outcome")).to_contain_text("role reader")
    held[0].fulfill(status=401, json={"error": "missing or invalid token"})
    is_live(page)


def test_what_is_no_mode_changes_nothing(guarded: Guarded) -> None:
    admin = guarded.token(Role.ADMIN)
    for body, problem in (
        (b"", "no mode"),
        (b"\xff", "no mode"),
        (b"[" * 60_000, "no mode"),
        (b'["ssp"]', "no mode"),
        (b'{"mode": "fast"}', "no mode"),
        (b'{"mode": ["ssp"]}', "no mode"),
        (b'{"mode": "ssp", "staleness_bound": true}', "no mode"),
        (b'{"mode": "ssp", "staleness_bound": 2.5}', "no mode"),
        (b'{"mode": "ssp", "staleness_bound": -1}', "not in 0 to"),
        (b'{"mode": "bsp", "staleness_bound": 3}', "not in 0 to 0"),
        (b'{"mode": "quorum", "quorum": 0}', "not in 1 to"),
        (b'{"mode": "quorum", "quorum": true}', "no mode"),
        (b'{"mode": "quorum", "grace_window_s": 1e999}', "no mode"),
        (b'{"mode": "quorum", "grace_window_s": -1}', "not in 0 to"),
        (b'{"mode": "bsp", "quorum": 2000000}', "not in 0 to"),
    ):
        status, text = guarded.post("mode", admin, body)
        assert status == 400
        assert problem in text
    assert guarded.post("mode", guarded.token(Role.READER), b"{}")[0] == 403
    assert guarded.mode_is(Mode.ASP, 0)


# What it shows


def test_200_workers_stay_readable(open_page: OpenPage) -> None:
    slow = {"trainer-17": 2.1, "trainer-90": 1.4}
    states = {"trainer-150": "lost", "trainer-199": "joining"}
    job = MadeJob(
        worker_ids=workers(200, "trainer-"),
        mode="ssp",
        cause="straggler",
        sentence="199 workers wait for trainer-17.",
        who=["trainer-17"],
        slow=slow,
        states=states,
    )
    with ServedPage(job) as served:
        page = open_page(served.url, viewport={"width": 1240, "height": 900})
        is_live(page)
        expect(tiles_of(page)).to_have_count(200)
        assert page.locator("#strip [role=group]").evaluate_all(
            "groups => groups.map(group => group.ariaLabel)"
        ) == ["Waited for", "Lost", "Joining", "Training"]
        waited_for = page.get_by_role("group", name="Waited for")
        expect(waited_for.get_by_role("option")).to_have_count(1)
        expect(waited_for).to_contain_text("17")
        rows = page.locator("#worker-table tbody tr")
        assert rows.locator("th").all_inner_texts()[:2] == ["trainer-17", "trainer-150"]
        # All are seen at once, and not one below the other.
        box = page.locator("#strip").bounding_box()
        assert box is not None
        assert box["height"] < 900
        page.get_by_label("Filter").fill("trainer-9")
        expect(tiles_of(page)).to_have_count(11)
        page.get_by_label("Filter").fill("lost")
        expect(rows).to_have_count(1)
        page.get_by_label("Filter").fill("")
        page.get_by_role("button", name="Show all 200 workers").click()
        expect(rows).to_have_count(200)
        page.get_by_label("Sort by").select_option("name")
        training = page.get_by_role("group", name="Training").get_by_role("option")
        expect(training.nth(2)).to_contain_text("2")


def test_a_slow_worker_that_nobody_waits_for_is_not_said_to_be_waited_for(
    open_page: OpenPage,
) -> None:
    job = MadeJob(
        worker_ids=workers(4),
        mode="quorum",
        cause="straggler",
        sentence="w1 is the straggler; the others go on without w1 in quorum.",
        who=["w1"],
        slow={"w1": 2.5},
        strategy=f"DiLoCo, 50 local steps a round {HOSTILE}",
    )
    with ServedPage(job) as served:
        page = open_page(served.url)
        is_live(page)
        strategy = page.locator("#strategy")
        expect(strategy).to_contain_text("Strategy: DiLoCo, 50 local steps a round <")
        slow = page.get_by_role("group", name="Slow").get_by_role("option")
        expect(slow).to_have_count(1)
        expect(page.get_by_role("group", name="Waited for")).to_have_count(0)
        slow.click()
        expect(page.locator("#worker-detail")).to_contain_text("slow")
        expect(page.locator("#worker-table tbody tr").first).to_contain_text("slow")
        job.mode, job.strategy = "bsp", None
        expect(page.get_by_role("group", name="Waited for")).to_contain_text("w1")
        expect(page.locator("#worker-detail")).to_contain_text("waited for")
        expect(strategy).to_be_hidden()


def test_a_worker_that_holds_up_others_can_be_told_from_those_that_wait(
    open_page: OpenPage,
) -> None:
    job = MadeJob(
        worker_ids=workers(3), cause="slow_link", who=["w1"], link_ms={"w1": 36.0}
    )
    with ServedPage(job) as served:
        page = open_page(served.url)
        is_live(page)
        row = page.locator("#worker-table tbody tr")
        slow, fast = row.filter(has_text="w1"), row.filter(has_text="w0")
        expect(slow.locator(".bar")).to_have_attribute(
            "title", re.compile("waiting for answers 36.0 ms, .* other workers 3.")
        )
        expect(fast.locator(".bar")).to_have_attribute(
            "title", re.compile("waiting for answers 6.0 ms, .* other workers 33.9")
        )
        # A tile is as long as what is a worker's own, and that of the slowest is full.
        widths = (
            tiles_of(page)
            .locator("i")
            .evaluate_all("bars => bars.map(bar => parseFloat(bar.style.width))")
        )
        assert widths[0] == 100
        assert max(widths[1:]) < 60
        tiles_of(page).first.click()
        detail = page.locator("#worker-detail")
        expect(detail).to_contain_text("Waiting for answers36.0 ms")


def test_what_is_empty_has_no_header(open_page: OpenPage) -> None:
    with ServedPage(MadeJob(worker_ids=[], loaders=())) as served:
        page = open_page(served.url)
        is_live(page)
        expect(page.get_by_text("No worker is here.")).to_be_visible()
        expect(page.get_by_text("Nothing has happened yet.")).to_be_visible()
        for name in ("workers", "events"):
            expect(page.get_by_role("region", name=f"Table of {name}")).to_be_hidden()
        expect(page.get_by_role("region", name="Table of shards")).to_be_visible()
        expect(page.get_by_text("held by workers")).to_be_hidden()


def test_names_of_clients_are_text(open_page: OpenPage) -> None:
    job = MadeJob(
        worker_ids=[HOSTILE, REVERSED, "__proto__"],
        cause="straggler",
        sentence=f"All wait for {HOSTILE}, in its layer {HOSTILE}.",
        who=[HOSTILE],
        metrics=(HOSTILE, "__proto__", "constructor"),
        loaders=(HOSTILE,),
        job_id=HOSTILE,
        events=[(1.0, "worker_joined", f"{HOSTILE} joined.")],
    )
    with ServedPage(job) as served:
        page = open_page(served.url)
        is_live(page)
        expect(page.locator("#sentence")).to_contain_text(HOSTILE)
        names = page.locator("#worker-table tbody th")
        assert HOSTILE in names.all_inner_texts()
        assert "\\u{202e}evil\\u{202c}" in names.all_inner_texts()
        expect(page.locator("#epochs")).to_contain_text(HOSTILE)
        expect(page.locator("#event-table")).to_contain_text(HOSTILE)
        metric = page.get_by_label("Metric")
        metric.select_option(HOSTILE)
        expect(page.locator("#metric-chart .plot")).to_have_attribute(
            "aria-label", f"{HOSTILE} over time"
        )
        tiles_of(page).first.click()
        expect(page.locator("#worker-detail")).to_contain_text(HOSTILE)
        assert page.evaluate("window.isTaken") is None
        assert page.locator("main img, main svg svg").count() == 0


def test_values_and_names_that_nobody_expects_leave_the_page_alive(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Next to the first value a step of the axis changes nothing: its marks never end.
    losses = (1e16, 1e16 + 2)
    monkeypatch.setattr(
        MadeJob,
        "_metrics",
        lambda _, at_s: {"loss": losses[int(at_s) % 2], "metrics": 0.5},
    )
    # Two names that look the same.
    job = MadeJob(worker_ids=["a"], loaders=("a\0", "a\\u{0}"))
    with ServedPage(job) as served:
        page = open_page(served.url)
        is_live(page)
        wait_for(page, lambda: served.paths.count("/status") >= 3)
        expect(page.locator("#epochs > li")).to_have_count(2)
        page.get_by_label("Metric").select_option("metrics")
        expect(page.locator("#metric-chart .readout")).to_contain_text("0.500")


def test_no_text_becomes_markup_whatever_the_page_does(browser: Browser) -> None:
    with (
        ServedPage(MadeJob(worker_ids=["w0"])) as served,
        closing(browser.new_page()) as page,
    ):
        page.goto(served.url)
        is_live(page)
        refused = page.evaluate(
            "html => { try { document.body.innerHTML = html } "
            "catch (error) { return error.name } }",
            HOSTILE,
        )
        assert refused == "TypeError"
        assert page.evaluate("window.isTaken") is None


def test_the_keyboard_reaches_everything(open_page: OpenPage) -> None:
    with ServedPage(MadeJob(worker_ids=workers(30))) as served:
        page = open_page(served.url, viewport={"width": 1240, "height": 900})
        is_live(page)
        press = page.keyboard.press
        press("Tab")
        expect(page.get_by_role("link", name="Skip to")).to_be_focused()
        press("Enter")
        press("Tab")
        expect(page.get_by_label("Metric")).to_be_focused()
        press("Tab")
        chart = page.get_by_role("slider", name="loss over time")
        expect(chart).to_be_focused()
        for key, text in (("ArrowLeft", "at "), ("Home", "clock"), ("End", "now")):
            press(key)
            expect(chart).to_have_attribute("aria-valuetext", re.compile(text))
        for _ in range(4):  # throughput, its chart, the filter, the order
            press("Tab")
        press("Tab")
        tiles = tiles_of(page)
        expect(tiles.first).to_be_focused()
        press("ArrowRight")
        press("ArrowDown")
        press("ArrowUp")
        expect(tiles.nth(1)).to_be_focused()
        detail = page.locator("#worker-detail")
        expect(detail).to_contain_text("w1")
        # It stays where it is while the page is shown anew.
        asked = len(served.paths)
        page.wait_for_function("!document.querySelector('#away').offsetParent")
        wait_for(page, lambda: len(served.paths) > asked + 3)
        expect(tiles.nth(1)).to_be_focused()
        press("Escape")
        expect(detail).to_be_hidden()
        press("Tab")
        expect(page.get_by_role("region", name="Table of workers")).to_be_focused()
        press("Tab")
        expect(page.get_by_role("button", name="Show all 30")).to_be_focused()
        press("Enter")
        expect(page.locator("#worker-table tbody tr")).to_have_count(30)


def test_a_screen_reader_hears_of_another_sentence_and_not_of_each_number(
    open_page: OpenPage,
) -> None:
    job = MadeJob(worker_ids=workers(2), sentence="2 workers train at 28.4 steps/s.")
    with ServedPage(job) as served:
        page = open_page(served.url)
        spoken = page.get_by_role("status").first
        expect(spoken).to_have_text("Training. 2 workers train at 28.4 steps/s.")
        job.sentence = "2 workers train at 31.0 steps/s."
        expect(page.locator("#sentence")).to_have_text(job.sentence)
        expect(spoken).to_have_text("Training. 2 workers train at 28.4 steps/s.")
        # The sentence comes first: the page may ask between the two.
        job.sentence = "All wait for w1."
        job.cause, job.who = "straggler", ["w1"]
        expect(spoken).to_have_text("Straggler. All wait for w1.")
        job.sentence = "All wait for w0."
        job.who = ["w0"]
        expect(spoken).to_have_text("Straggler. All wait for w0.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_stands_in_the_way_of_people(open_page: OpenPage, scheme: str) -> None:
    """As axe-core knows it: names, roles, order of headings, contrast."""
    job = MadeJob(
        worker_ids=workers(20),
        cause="straggler",
        sentence="All wait for w3.",
        who=["w3"],
        states={"w4": "lost", "w5": "joining"},
        mode="ssp",
        slow={"w3": 2.0},
        events=[(1.0, "worker_lost", "w4 is lost."), (2.0, "job_started", "")],
    )
    with ServedPage(job) as served:
        # axe-core makes style sheets, which the policy of the page would refuse.
        page = open_page(served.url, color_scheme=scheme, bypass_csp=True)
        is_live(page)
        tiles_of(page).first.click()
        found = Axe().run(page).response["violations"]
        assert [
            (each["id"], node["html"]) for each in found for node in each["nodes"]
        ] == []


def test_a_narrow_screen_shows_all_without_scrolling_sideways(
    open_page: OpenPage,
) -> None:
    job = MadeJob(
        worker_ids=workers(30, "a-rather-long-name-of-a-worker-"),
        events=[(3.0, "worker_joined", "w" * 200)],
        job_id="j" * 120,
        loaders=("l" * 120,),
        sentence="x" * 120,
    )
    with ServedPage(job) as served:
        page = open_page(served.url, viewport={"width": 360, "height": 740})
        is_live(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        # Once all that it asks for is there.
        asked = len(served.paths)
        wait_for(page, lambda: len(served.paths) > asked + 3)
        top = page.locator("#workers").bounding_box()
        wait_for(page, lambda: len(served.paths) > asked + 7)
        assert page.locator("#workers").bounding_box() == top, "the page jumps"


def wait_for(page: Page, is_so: Callable[[], bool]) -> None:
    """Returns once it is so; the page goes on meanwhile."""
    for _ in range(LIMIT_MS // 50):
        if is_so():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it took too long")
