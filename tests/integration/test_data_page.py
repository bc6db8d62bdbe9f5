"""docs/data.md does what it says; `readme_session` says how its blocks run."""

from pathlib import Path

import pytest

from tests.integration.readme_session import ReadmeSession

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
def test_the_page_about_data_does_what_it_says(tmp_path: Path) -> None:
    page = CHECKOUT / "docs" / "data.md"
    with ReadmeSession(page, checkout=CHECKOUT, scratch=tmp_path) as session:
        assert session.run() >= 4
