"""What tokens and TLS cost: the same steps in jobs without, and with either.

Each job has a shard, and a worker that is in all of them.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Final

from psctl.bench.workload import (
    OVER_TCP,
    CannotRunError,
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    time_at_most,
)
from psctl.bench.workloads.big_parameter import job_steps
from psctl.bench.workloads.small_model import small_steps
from psctl.protection import Protection, made_protection

_PLAIN, _TOKENS, _TLS = "plain", "tokens", "tls"


def _start(ground: Ground) -> dict[str, str]:
    """Starts a job of each kind; addresses, and what a worker proves itself with."""
    places = {}
    for name in (_PLAIN, _TOKENS, _TLS):
        has_tls = name == _TLS
        if has_tls and find_spec("cryptography") is None:
            continue
        protection = Protection()
        if name != _PLAIN:
            folder = ground.scratch / f"{name}-credentials"
            folder.mkdir(mode=0o700)
            protection = made_protection(
                folder, has_tokens=not has_tls, has_tls=has_tls
            )
        places[name] = ground.start_job(name=name, protection=protection)
        places[_environment(name)] = json.dumps(dict(protection.workers))
    return places


def _environment(name: str) -> str:
    return f"environment of {name}"


def _entry(name: str, text: str, begin: Callable[[Member], Contender]) -> Entry:
    def begun(member: Member) -> Contender:
        if name not in member.places:
            raise CannotRunError(
                "certificates take `pip install 'paramserver[tls]'`, which is not there"
            )
        # Channels read it as they are opened: by the end of prepare() they all are.
        proof: Mapping[str, str] = json.loads(member.places[_environment(name)])
        os.environ.update(proof)
        return begin(member)

    return Entry(name, text, begun)


def _workload(
    name: str,
    title: str,
    about_s: int,
    begin: Callable[[str], Callable[[Member], Contender]],
    limit: float,
) -> Workload:
    return Workload(
        name=name,
        about_s=about_s,
        title=title,
        entries=(
            _entry(_PLAIN, "nothing asked of anybody", begin(_PLAIN)),
            _entry(_TOKENS, "a token with each call", begin(_TOKENS)),
            _entry(_TLS, "mutual TLS 1.3", begin(_TLS)),
        ),
        targets=(time_at_most(_TOKENS, limit, _PLAIN),),
        start=_start,
        environment=OVER_TCP,
    )


SECURE_EXCHANGE: Final = _workload(
    "secure_exchange",
    "push + apply (SGD) + pull of one big parameter, TCP, with tokens and TLS",
    30,
    job_steps,
    1.05,
)

SECURE_SMALL: Final = _workload(
    "secure_small",
    "BSP step of a model of 10,000 parameters, with tokens and TLS",
    15,
    lambda place: partial(small_steps, place=place),
    1.1,
)
