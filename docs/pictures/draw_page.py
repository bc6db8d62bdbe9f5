"""Draws `page.png` and `page-200.png` beside this file: the page of a job.

The first is of a real job, in which one of four workers is slowed down; it trains for a
minute and a half. The second is of documents that nobody's job has written.
"""

import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from playwright.sync_api import Browser, expect
from sklearn.datasets import load_digits
from torch import nn, optim, tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from psserver.config import ListenConfig
from psserver.coordinator.core.diagnosis import CURES, Cause
from pswire.addresses import Address
from tests.doubles.made_documents import MadeJob
from tests.doubles.served_page import ServedPage, chromium
from tests.integration.job import Crew, Job, connect

FOLDER: Final = Path(__file__).parent
TRAINING_S: Final = 60
WAIT_MS: Final = 60_000
STEP_S: Final = 0.04
"""What stands for the computation of a larger model."""
SLOW_STEP_S: Final = 0.15


def train(job: Job, name: str, slow: threading.Event, enough: threading.Event) -> None:
    """A worker, which is slow from a moment on."""
    digits = load_digits()
    data = TensorDataset(tensor(digits.data).float() / 16, tensor(digits.target))
    with connect(job, name) as ps:
        model: nn.Module = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        optimizer: optim.Optimizer = optim.Adam(model.parameters(), lr=3e-4)
        loader = DataLoader(data, batch_size=16, shuffle=True)
        model, optimizer, loader = ps.prepare(model, optimizer, loader)
        while not enough.is_set():
            for images, labels in loader:
                loss = cross_entropy(model(images), labels)
                loss.backward()
                time.sleep(SLOW_STEP_S if slow.is_set() else STEP_S)
                optimizer.step()
                optimizer.zero_grad()
                ps.log(loss=loss)


def draw(browser: Browser, url: str, name: str, scheme: str, height: int) -> None:
    """Draws the top of a page, once it shows something."""
    page = browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": 1240, "height": height},
    )
    page.goto(url)
    expect(page.locator("#cause")).to_have_text("Straggler", timeout=WAIT_MS)
    expect(page.locator("#metric-chart .readout")).to_contain_text("now")
    page.screenshot(path=FOLDER / name)
    page.close()


def draw_real_job(browser: Browser) -> None:
    """A job that trains well, and then one of its workers gets slow."""
    enough = threading.Event()
    admin = ListenConfig(address=Address("127.0.0.1", 0))
    admin = admin.admin(admin.address)
    names = [f"worker-{index}" for index in range(4)]
    slow = {name: threading.Event() for name in names}
    with TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "checkpoints"
        checkpoints.mkdir()
        with (
            Job(
                Path(folder),
                workers_min=4,
                admin=admin,
                checkpoint_url=str(checkpoints),
            ) as job,
            Crew(
                {name: lambda n: train(job, n, slow[n], enough) for name in names}
            ) as crew,
        ):
            try:
                time.sleep(TRAINING_S)
                slow["worker-2"].set()
                time.sleep(TRAINING_S / 4)
                draw(browser, job.coordinator.admin_url, "page.png", "light", 960)
            finally:
                enough.set()
            crew.results()


def draw_many_workers(browser: Browser) -> None:
    """200 workers, one of which the others wait for."""
    job = MadeJob(
        worker_ids=[f"trainer-{index}" for index in range(200)],
        mode="ssp",
        cause="straggler",
        sentence=(
            "trainer-17 is the straggler: its step takes 66 ms, of which it computes "
            "50 ms; the others compute 24 ms and wait for trainer-17 at the staleness "
            f"bound; {CURES[Cause.STRAGGLER]}"
        ),
        who=["trainer-17"],
        slow={"trainer-17": 2.1, "trainer-90": 1.4, "trainer-3": 1.35},
        states={"trainer-150": "lost", "trainer-199": "joining"},
        began_at_unix_s=time.time() - 754,
    )
    with ServedPage(job) as served:
        draw(browser, served.url, "page-200.png", "dark", 940)


def main() -> None:
    """Draws both."""
    with chromium() as browser:
        draw_many_workers(browser)
        draw_real_job(browser)


if __name__ == "__main__":
    main()
