from typing import Any

import pytest

from pswire.addresses import Address
from psworker.config import (
    WorkerConfig,
    arm_failpoints,
    check_timeouts,
    find_coordinator,
    find_history,
    named_coordinator,
)
from psworker.connecting import find_worker_id
from psworker.errors import ConfigurationError


def test_the_argument_goes_before_the_environment() -> None:
    environ = {"PS_COORDINATOR": "b:2", "PS_WORKER_ID": "w2"}

    assert find_coordinator("a:1", environ) == Address("a", 1)
    assert find_coordinator(None, environ) == Address("b", 2)
    assert find_worker_id("w1", environ) == "w1"
    assert find_worker_id(None, environ) == "w2"


def test_an_id_that_is_given_names_a_worker() -> None:
    environ = {"PS_WORKER_ID": ""}
    assert find_worker_id(None, environ) == "", "as if it were not set"

    with pytest.raises(ConfigurationError, match="names no worker: leave it out"):
        find_worker_id("", {"PS_WORKER_ID": "w2"})
    with pytest.raises(ConfigurationError, match=r"worker_id=7\) is no text"):
        find_worker_id(7, environ)  # type: ignore[arg-type]


def test_without_any_address_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="PS_COORDINATOR=HOST:PORT"):
        find_coordinator(None, {"PATH": ""})
    assert named_coordinator(None, {"PATH": ""}) is None


@pytest.mark.parametrize("text", ["7000", "host", "host:", ":1", "::1:7", "h:99999"])
def test_an_address_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="address"):
        find_coordinator(text)


def test_port_0_can_not_be_called() -> None:
    with pytest.raises(ConfigurationError, match="no port that can be called"):
        find_coordinator("localhost:0")


@pytest.mark.parametrize(
    "seconds", [0, -1.0, float("nan"), float("-inf"), 1e30, "abc", "", None, True]
)
@pytest.mark.parametrize(
    "name", ["connect_timeout_s", "step_timeout_s", "start_timeout_s"]
)
def test_a_timeout_is_above_0_and_of_a_length_that_can_be_waited(
    name: str,
    seconds: Any,  # noqa: ANN401, what a user may give
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        WorkerConfig(coordinator=Address("a", 1), **{name: seconds})
    assert str(caught.value) == (
        f"connect({name}=...): {seconds!r} is not a number of seconds above 0, at most "
        "31536000"
    )


@pytest.mark.parametrize("seconds", [1, 0.001, 31_536_000, float("inf")])
def test_any_other_time_is_taken(seconds: float) -> None:
    check_timeouts(step_timeout_s=seconds)


def test_what_is_wrong_in_the_environment_says_where_it_is() -> None:
    with pytest.raises(ConfigurationError, match="PS_COORDINATOR: 'nowhere' is no"):
        named_coordinator(None, {"PS_COORDINATOR": "nowhere"})
    with pytest.raises(ConfigurationError, match="PS_COORDINATOR: 'a:0' names no port"):
        named_coordinator(None, {"PS_COORDINATOR": "a:0"})


def test_a_history_is_wanted_by_the_environment() -> None:
    assert find_history({"PS_HISTORY": "runs/"}) == "runs/"
    assert find_history({"PATH": ""}) == ""


def test_failpoints_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no failpoint 'worker\.stop'"):
        arm_failpoints({"PS_FAILPOINT": "worker.stop=kill"})
