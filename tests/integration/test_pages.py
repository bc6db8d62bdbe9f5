"""The pages of docs/ do what they say; `readme_session` says how their blocks run.

The processes that they start are forked. Those of README.md are not.
"""

from pathlib import Path

import pytest

from tests.doubles.children import Nursery
from tests.doubles.forked_commands import forked_commands
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
    name: str, block_count: int, nursery: Nursery, tmp_path: Path
) -> None:
    page = CHECKOUT / "docs" / name
    with (
        forked_commands(nursery) as forked,
        ReadmeSession(
            page, checkout=CHECKOUT, scratch=tmp_path, commands=forked
        ) as session,
    ):
        assert session.run() >= block_count
