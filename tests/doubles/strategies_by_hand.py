"""Papers' algorithms for all workers in one process, in the papers' own letters.

A worker is a number; `gradient(i, t, x)` is that of its t-th step at the values x.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch

Values = list[torch.Tensor]
Gradient = Callable[[int, int, Values], Values]
Event = tuple[int, int]
"""A worker's step, with a 0; or its push, with the number of workers there are."""


def plus(x: Values, y: Values, factor: float = 1.0) -> Values:
    return [a + factor * b for a, b in zip(x, y, strict=True)]


def times(factor: float, x: Values) -> Values:
    return [factor * a for a in x]


class Workers:
    """Their own values, and how many steps each has taken."""

    def __init__(self, gradient: Gradient, eta: float) -> None:
        self._gradient = gradient
        self._eta = eta
        self._steps: dict[int, count[int]] = {}
        self.x: dict[int, Values] = {}

    def gradient(self, i: int, x: Values) -> Values:
        """That of the next step of worker i."""
        return self._gradient(i, next(self._steps.setdefault(i, count())), x)

    def step(self, i: int) -> Values:
        """Plain SGD on the worker's own values; the gradient."""
        g = self.gradient(i, self.x[i])
        self.x[i] = plus(self.x[i], g, -self._eta)
        return g


def easgd(
    center: Values,
    workers: Workers,
    rounds: Sequence[Mapping[int, tuple[int, int]]],
    beta: float,
) -> Values:
    """Equations 3 and 4 of Zhang, Choromanska and LeCun, 2015, with beta = p alpha.

    A round: how many steps each worker takes, and p as far as it knows: one that has
    just joined or left may be in it.
    """
    x = workers.x
    for taking in rounds:
        for i, (tau, _) in taking.items():
            x.setdefault(i, center)
            for _ in range(tau):
                workers.step(i)
        before = center
        center = times(1 - beta, before)
        for i, (_, p) in taking.items():
            center = plus(center, x[i], beta / len(taking))
            x[i] = plus(x[i], plus(x[i], before, -1), -beta / p)
    return center


def easgd_asynchronous(
    center: Values, workers: Workers, events: Sequence[Event], beta: float
) -> Values:
    """Their algorithm 1, with alpha = beta / p."""
    x = workers.x
    for i, p in events:
        if i not in x:
            x[i] = center
        if not p:
            workers.step(i)
            continue
        difference = plus(x[i], center, -1)
        x[i] = plus(x[i], difference, -beta / p)
        center = plus(center, difference, beta / p)
    return center


def downpour(
    server: Values,
    workers: Workers,
    events: Sequence[Event],
    *,
    n_fetch: int,
    gamma: float,
) -> Values:
    """Algorithm 7.1 of Dean and others, 2012, with Adagrad."""
    squares = times(0, server)
    accrued: dict[int, Values] = {}
    taken: dict[int, int] = {}
    for i, p in events:
        if i not in workers.x:
            workers.x[i], accrued[i], taken[i] = server, times(0, server), 0
        if not p:
            accrued[i] = plus(accrued[i], workers.step(i))
            taken[i] += 1
            continue
        g, accrued[i] = accrued[i], times(0, server)
        squares = [s + a * a for s, a in zip(squares, g, strict=True)]
        server = [
            w - gamma * a / (s.sqrt() + 1e-10)
            for w, a, s in zip(server, g, squares, strict=True)
        ]
        if taken[i] % n_fetch == 0:
            workers.x[i] = server
    return server


def fedavg(
    w: Values,
    gradient: Gradient,
    rounds: Sequence[Mapping[int, tuple[int, float]]],
    eta: float,
    mu: float = 0.0,
) -> Values:
    """Algorithm 1 of McMahan and others, 2017; with mu algorithm 2 of FedProx.

    Each round has of its workers the steps, and the samples n_k.
    """
    steps: dict[int, count[int]] = {}
    for taking in rounds:
        n = sum(n_k for _, n_k in taking.values())
        following = times(0, w)
        for k, (step_count, n_k) in taking.items():
            own = w
            for _ in range(step_count):
                g = gradient(k, next(steps.setdefault(k, count())), own)
                own = plus(own, plus(g, plus(own, w, -1), mu), -eta)
            following = plus(following, own, n_k / n)
        w = following
    return w


def asynchronous_local_sgd(
    theta: Values,
    workers: Workers,
    events: Sequence[Event],
    *,
    epsilon: float,
    beta: float,
    size: int,
    c: float,
) -> Values:
    """Algorithms 2 and 3 of Liu and others, 2024."""
    m, delta, t = times(0, theta), times(0, theta), 0
    began: dict[int, Values] = {}
    for i, p in events:
        if i not in began:
            began[i] = workers.x[i] = theta
        if not p:
            workers.step(i)
            continue
        g = plus(began[i], workers.x[i], -1)
        delta = plus(delta, g)
        part = c
        if (t + 1) % size == 0:
            m = plus(times(beta, m), delta, 1 / size)
            delta = times(0, theta)
            part = 1 - c * size + c
        theta = plus(plus(theta, m, -epsilon * part * beta), g, -epsilon / size)
        began[i] = workers.x[i] = theta
        t += 1
    return theta
