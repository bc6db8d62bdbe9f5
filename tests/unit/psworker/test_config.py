import pytest

from pswire.addresses import Address
from psworker.config import (
    WorkerConfig,
    arm_failpoints,
    find_coordinator,
    find_history,
    find_worker_id,
    named_coordinator,
)
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


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_timeout_is_above_0(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="step_timeout_s must be above 0"):
        WorkerConfig(coordinator=Address("a", 1), step_timeout_s=seconds)


def test_a_history_is_wanted_by_the_environment() -> None:
    assert find_history({"PS_HISTORY": "runs/"}) == "runs/"
    assert find_history({"PATH": ""}) == ""


def test_failpoints_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no failpoint 'worker\.stop'"):
        arm_failpoints({"PS_FAILPOINT": "worker.stop=kill"})
