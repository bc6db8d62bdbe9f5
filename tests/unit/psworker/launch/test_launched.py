"""Which process of which host group this is."""

import pytest

from psworker.errors import ConfigurationError
from psworker.launch.launched import HostPlace, find_host_place


def test_without_a_name_there_is_no_group() -> None:
    assert find_host_place({"PS_LOCAL_RANK": "0", "PS_LOCAL_SIZE": "2"}) is None


def test_a_place_is_read_from_the_environment() -> None:
    found = find_host_place(
        {"PS_HOST_GROUP": "g", "PS_LOCAL_RANK": "1", "PS_LOCAL_SIZE": "2"}
    )
    assert found == HostPlace("g", 1, 2)


def test_a_process_that_was_started_again_is_told_so() -> None:
    environ = {"PS_HOST_GROUP": "g", "PS_LOCAL_RANK": "1", "PS_LOCAL_SIZE": "2"}
    for count, is_restart in (("0", False), ("2", True)):
        found = find_host_place(environ | {"PS_RESTART_COUNT": count})
        assert found == HostPlace("g", 1, 2, is_restart)


@pytest.mark.parametrize(
    ("index", "count", "text"),
    [
        ("", "2", "PS_HOST_GROUP=g needs PS_LOCAL_RANK"),
        ("one", "2", "PS_HOST_GROUP=g needs PS_LOCAL_RANK"),
        ("2", "2", "PS_LOCAL_RANK=2 and PS_LOCAL_SIZE=2 do not go together"),
        ("0", "257", "of at most 256 processes"),
    ],
)
def test_a_place_that_is_none_is_refused(index: str, count: str, text: str) -> None:
    environ = {"PS_HOST_GROUP": "g", "PS_LOCAL_RANK": index, "PS_LOCAL_SIZE": count}
    with pytest.raises(ConfigurationError, match=text):
        find_host_place(environ)
