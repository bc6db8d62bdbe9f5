"""The pages of docs/ do what they say; `readme_session` says how their blocks run."""

from pathlib import Path

import pytest

from tests.integration.readme_session import ReadmeSession

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "block_count"),
    [
        ("getting-started.md", 3),
        ("data.md", 4),
        # What its scripts do, `test_other_formats.py` tries in one process.
        pytest.param("formats.md", 5, marks=pytest.mark.repeat),
    ],
)
def test_the_page_does_what_it_says(
    name: str, block_count: int, tmp_path: Path
) -> None:
    page = CHECKOUT / "docs" / name
    with ReadmeSession(page, checkout=CHECKOUT, scratch=tmp_path) as session:
        assert session.run() >= block_count
