"""The page on failpoints lists what there is."""

import re
from pathlib import Path

from pswire.failpoints import ACTIONS, FAILPOINTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "failpoints.md"


def test_the_page_lists_every_name_and_action() -> None:
    listed = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*FAILPOINTS, *ACTIONS])
