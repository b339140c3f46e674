"""Simulated host clocks that differ and drift: the true difference is always within the stated error."""

import math
import random

import pytest

from allranks._trace.clocks import Bounds, fit, join_clocks

SECOND = 1_000_000_000


class Host:
    """Clock with an arbitrary start value, and a different speed that changes slowly."""

    def __init__(self, seed, drift=0.0, wander=0.0):
        chance = random.Random(seed)
        self.start = chance.randrange(1, 10**15)
        self.drift, self.wander = drift, wander

    def __call__(self, true_ns):
        swing = self.wander * 100e9 / (2 * math.pi) * math.sin(2 * math.pi * true_ns / 100e9)
        return self.start + true_ns + round(self.drift * true_ns + swing)


def call(chance, at, one, other, bounds, latency_ns=8_000):
    """Simulate a collective at about that time. The first rank that enters it waits for the other rank."""
    entered = [at + chance.randrange(0, 200_000) for _ in range(2)]
    met = max(entered)
    for it, (mine, yours) in enumerate(((one, other), (other, one))):
        returned = mine(met + 1_000 + round(chance.expovariate(1 / latency_ns)))
        early = yours(entered[1 - it])
        bounds[it, 1 - it].lower.append((returned, early - returned))
        bounds[1 - it, it].upper.append((early, returned - early))


def simulate(seed, seconds, every_s, one, other):
    chance = random.Random(seed)
    bounds = {(0, 1): Bounds(), (1, 0): Bounds()}
    at = 0
    while at < seconds * SECOND:
        call(chance, at, one, other, bounds)
        at += round(every_s * SECOND * chance.uniform(0.5, 1.5))
    return bounds[0, 1]


def wrong_by(found, one, other, seconds):
    """Yield the true error and the stated error of the fitted clock at 200 times."""
    for i in range(200):
        at = round(seconds * SECOND * i / 199)
        ns = one(at)
        yield abs(found(ns) - other(at)), found.error(ns)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("seconds", "every_s", "drift", "wander"),
    [(0.05, 0.001, 0, 0), (3, 0.01, 40e-6, 0), (100, 0.02, -90e-6, 0), (300, 0.1, 20e-6, 0.3e-6)],
    ids=["short", "drift", "long", "wander"],
)
def test_true_difference_is_within_stated_error(seed, seconds, every_s, drift, wander):
    one, other = Host(seed), Host(seed + 100, drift, wander)
    found = fit(simulate(seed, seconds, every_s, one, other), one(0), one(round(seconds * SECOND)))
    for off, error in wrong_by(found, one, other, seconds):
        assert off <= error
        assert error <= 50_000
    assert found.drift == pytest.approx(drift, abs=2e-4 if seconds < 1 else 1e-6)


def test_error_bound_holds_after_sudden_drift_change():
    one = Host(1)
    base = Host(2)

    def other(true_ns):  # from second 25 on, the kernel corrects the clock
        return base(true_ns) + round(max(0, true_ns - 25 * SECOND) * 200e-6)

    found = fit(simulate(3, 60, 0.01, one, other), one(0), one(60 * SECOND))
    for off, error in wrong_by(found, one, other, 60):
        assert off <= error
        assert error < 200_000


def test_error_bound_covers_clock_jump():
    one, base = Host(1), Host(2)

    def other(true_ns):
        return base(true_ns) + (50_000_000 if true_ns > 2 * SECOND else 0)

    found = fit(simulate(3, 4, 0.01, one, other), one(0), one(4 * SECOND))
    assert all(off <= error for off, error in wrong_by(found, one, other, 4))
    assert found.largest_error < 100_000_000


def test_error_grows_with_distance_from_a_single_call():
    one, other = Host(1), Host(2, 50e-6)
    bounds = simulate(1, 0.001, 1, one, other)
    assert len(bounds) == 1
    found = fit(bounds, one(0), one(SECOND))
    offs = list(wrong_by(found, one, other, 1))
    assert all(off <= error for off, error in offs)
    assert offs[0][1] < 200_000 < offs[-1][1]  # the clock may have drifted since the call


def test_fit_needs_bounds_on_both_sides():
    assert fit(Bounds(), 0, 1) is None
    assert fit(Bounds(lower=[(0, 5)]), 0, 1) is None


def test_clocks_are_joined_through_intermediate_hosts():
    hosts = [Host(i, i * 10e-6) for i in range(4)]
    bounds = {}
    for a, b in ((0, 1), (1, 2)):
        chance = random.Random(a)
        pair = {(0, 1): Bounds(), (1, 0): Bounds()}
        for i in range(100):
            call(chance, i * SECOND // 50, hosts[a], hosts[b], pair)
        bounds[a, b], bounds[b, a] = pair[0, 1], pair[1, 0]
    spans = {i: (host(0), host(2 * SECOND)) for i, host in enumerate(hosts)}
    links = join_clocks(0, spans, bounds)
    assert sorted(links) == [0, 1, 2]  # nothing connects the fourth
    for i, link in links.items():
        assert len(link.through) == i
        for at in (0, SECOND, 2 * SECOND):
            assert abs(link(hosts[i](at)) - hosts[0](at)) <= link.error(hosts[i](at)) <= link.largest_error < 100_000
