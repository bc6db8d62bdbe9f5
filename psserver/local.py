"""A coordinator and its shards on one machine, under one supervisor."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence

from psserver.config import ConfigurationError, CoordinatorConfig, OptionError
from psserver.edge.coordinator_settings import ShardLossPolicy
from psserver.edge.ending import JobFailedError
from psserver.edge.lifecycle import (
    DRAIN_TIMEOUT_S,
    LAST_CHECKPOINT_S,
    notify_systemd,
    print_line,
    stay,
)
from pswire.addresses import Address
from pswire.config_options import switch_argument
from pswire.exit_codes import ExitCode
from pswire.history import is_for_many
from pswire.logs import LOG_DIR_VARIABLE, LogFolderError, file_handler

log = logging.getLogger("psserver.local")

PR_SET_PDEATHSIG = 1

RETURNS = "and the job returns to its newest checkpoint"
GOES_ON = "and training goes on meanwhile"
"""The shards have the values, and the state folder has all else."""

SHORT_LIFE_S = 5.0
"""A daemon that is killed before has not come to read its state, or dies of it."""

SHORT_LIVES_MAX = 5
"""Short lives of a daemon in a row, after which the job ends: what kills it each time,
as too little memory does, would kill it for ever."""

PAUSE_S = 1.0
"""Before a daemon is started again after a short life; each time in a row twice as
long."""


async def run_local(
    config: CoordinatorConfig,
    job_arguments: list[str],
    *,
    shard_arguments: Sequence[str] = (),
    verbose: bool,
) -> None:
    """Runs all daemons of a job until told to stop, or until one of them ends.

    Args:
        config: Of its coordinator.
        job_arguments: The same, for a command line.
        shard_arguments: Of the shards alone, for a command line.
        verbose: Whether they log more.

    Raises:
        ConfigurationError: A setting is wrong.
        JobFailedError: A daemon ended by itself.
    """
    if config.listen.address.is_unspecified:
        is_open = config.listen.missing_protection
        trusted = " --insecure on a network that you trust" if is_open else ""
        raise OptionError(
            f"--listen {config.listen.address} is every address of this machine, and "
            "workers are told one of each shard: say which one they shall use, as in "
            f"--listen 192.168.0.7:{config.listen.address.port}{trusted}; or start a "
            "`psserver coordinator` and `psserver shard --advertise HOST:PORT`"
        )
    config.validate()
    if config.listen.tokens and config.listen.credentials.token is None:
        raise OptionError(
            f"--tokens {config.listen.tokens} is there without --token-file: the "
            "shards show their coordinator a token of role shard; make one by `psctl "
            f"token create --role shard --tokens {config.listen.tokens} --out FILE`"
        )
    if config.history and not is_for_many(config.history):
        raise OptionError(
            f"--history {config.history} is one file, and these are "
            f"{1 + config.shard_count} processes: give a folder that ends with a slash"
        )
    children: list[asyncio.subprocess.Process] = []
    own_log = _own_log(config)
    try:
        await stay(
            _supervise(
                config,
                job_arguments,
                children,
                shard_arguments=shard_arguments,
                verbose=verbose,
            )
        )
    finally:
        if config.checkpoint_url is not None:
            await _stop_first(children)
        await _stop(children)
        if own_log is not None:
            logging.getLogger().removeHandler(own_log)
            own_log.close()


def _own_log(config: CoordinatorConfig) -> logging.Handler | None:
    """Keeps a log in the state folder, unless logs go elsewhere already."""
    if LOG_DIR_VARIABLE in os.environ:
        return None
    try:
        found = file_handler(config.state_dir / "logs", "local")
    except LogFolderError as error:
        raise ConfigurationError(str(error)) from error
    logging.getLogger().addHandler(found)
    return found


async def _supervise(
    config: CoordinatorConfig,
    job_arguments: list[str],
    children: list[asyncio.subprocess.Process],
    *,
    shard_arguments: Sequence[str],
    verbose: bool,
) -> None:
    # All that it was given, off or on: they read the same variables and file.
    common = [
        *config.limits.arguments(),
        switch_argument("insecure", config.listen.insecure),
        switch_argument("verbose", verbose),
    ]
    common += [f"--tokens={config.listen.tokens}"] if config.listen.tokens else []
    common += [f"--history={config.history}"] if config.history else []
    if LOG_DIR_VARIABLE not in os.environ:
        common += [f"--log-dir={config.state_dir / 'logs'}"]
    coordinator_arguments = (
        f"--state-dir={config.state_dir / 'coordinator'}",
        f"--admin-listen={'off' if config.admin is None else config.admin.address}",
        *job_arguments,
        *common,
    )
    coordinator = await _start(
        "coordinator", f"--listen={config.listen.address}", *coordinator_arguments
    )
    children.append(coordinator)
    assert coordinator.stdout is not None
    line = (await coordinator.stdout.readline()).decode().strip()
    if not line:
        code = await coordinator.wait()
        if code == ExitCode.BAD_CONFIGURATION:  # it has said what is wrong
            raise ConfigurationError(
                f"the coordinator did not start (exit code {code})"
            )
        raise JobFailedError(f"the coordinator did not start (exit code {code})")
    address = line.rsplit(" ", 1)[-1]
    print_line(line)
    shards = [
        (
            "shard",
            f"--coordinator={address}",
            f"--listen={shard_listen(config.listen.address)}",
            "--admin-listen="
            f"{'off' if config.admin is None else shard_listen(config.admin.address)}",
            f"--state-dir={config.state_dir / f'shard-{index}'}",
            f"--index={index}",
            *shard_arguments,
            *common,
        )
        for index in range(config.shard_count)
    ]
    children += [await _start(*arguments) for arguments in shards]
    returns = (
        config.checkpoint_url is not None
        and config.shard_loss_policy is not ShardLossPolicy.FAIL
    )
    notify_systemd("READY=1")
    again = ("coordinator", f"--listen={address}", *coordinator_arguments)
    keeping = [_keep("the coordinator", 0, again, children, GOES_ON)]
    keeping += [
        _keep(f"shard {i}", 1 + i, arguments, children, RETURNS if returns else "")
        for i, arguments in enumerate(shards)
    ]
    duties = [asyncio.create_task(each) for each in keeping]
    try:
        await asyncio.gather(*duties)
    finally:
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)


async def _keep(
    name: str,
    place: int,
    arguments: tuple[str, ...],
    children: list[asyncio.subprocess.Process],
    what_follows: str,
) -> None:
    """Starts a daemon again each time that it is killed, as long as that may help.

    Args:
        name: The daemon, for people.
        place: Its place among `children`.
        arguments: Of its command line.
        children: All processes.
        what_follows: What the job does without it, until it is there again; empty if
            the job can't go on.

    Raises:
        JobFailedError: It ended by itself, or lives too short each time.
    """
    loop = asyncio.get_running_loop()
    short_count = 0
    while True:
        began_s = loop.time()
        code = await children[place].wait()
        ended = f"{name} {_ended_text(code)}"
        if code >= 0 or not what_follows:
            raise JobFailedError(ended)
        is_short = loop.time() - began_s < SHORT_LIFE_S
        short_count = short_count + 1 if is_short else 0
        if short_count >= SHORT_LIVES_MAX:
            raise JobFailedError(
                f"{ended}, {short_count} times in a row within {SHORT_LIFE_S:g} s of "
                "its start: see the log of the machine for what kills it, such as too "
                "little memory"
            )
        pause_s = PAUSE_S * 2 ** (short_count - 1) if is_short else 0.0
        when = f"in {pause_s:g} s" if pause_s else "now"
        log.warning("%s: it is started again %s, %s", ended, when, what_follows)
        await asyncio.sleep(pause_s)
        child = children[place] = await _start(*arguments)
        if place == 0:
            assert child.stdout is not None
            await child.stdout.readline()  # where it listens, as before


def _ended_text(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def shard_listen(coordinator: Address) -> Address:
    """Where shards listen: whoever reaches the coordinator reaches them too."""
    return Address("127.0.0.1" if coordinator.is_loopback else coordinator.host, 0)


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "psserver",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        # The service manager hears of this process.
        env={**os.environ, "NOTIFY_SOCKET": ""},
        preexec_fn=_prepare_child,
    )


def _prepare_child() -> None:
    """In the child: a group of its own, and an end with its supervisor's.

    The group keeps a terminal's Ctrl-C with the supervisor, which passes it on.
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _stop_first(children: list[asyncio.subprocess.Process]) -> None:
    """Sends SIGTERM to the coordinator, and waits for its last checkpoint.

    Its shards must live until then.
    """
    if not children:
        return
    coordinator = children[0]
    assert coordinator.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        coordinator.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_CHECKPOINT_S + 1):
            await coordinator.stdout.readline()  # or its end


async def _stop(children: list[asyncio.subprocess.Process]) -> None:
    """Tells all of them to end, and waits until they have.

    The coordinator first: one that drains takes no shard that ends for lost. Shards
    in the same moment, so that their streams end before it has to break them.
    """
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
    await asyncio.gather(*(_wait_ended(child) for child in children))


async def _wait_ended(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S + 1):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
