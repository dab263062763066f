"""The statistics of evaluations against brute force and published tables."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_sdk.statistics import (
    clustered_error,
    mean_of,
    pass_at_k,
    pass_of,
    share_of,
    student_cdf,
    student_quantile,
    wilson,
)

rewards = st.lists(st.lists(st.floats(-10, 10), max_size=5), max_size=8)
hits = st.lists(st.lists(st.booleans(), max_size=5), max_size=8)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(plays, data):
    k = data.draw(st.integers(1, len(plays)))
    subsets = list(itertools.combinations(plays, k))
    assert pass_at_k(len(plays), sum(plays), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("num", "correct", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_is_not_defined_outside_its_range(num, correct, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(num, correct, k)


def test_pass_at_k_of_thousands_of_plays_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@given(rewards)
def test_the_clustered_error_sums_the_products_within_each_task(clusters):
    filled = [cluster for cluster in clusters if cluster]
    found = clustered_error(clusters)
    if len(filled) < 2:
        assert found is None
        return
    mean = fmean(itertools.chain(*filled))
    num = sum(map(len, filled))
    products = sum((a - mean) * (b - mean) for cluster in filled for a in cluster for b in cluster)
    variance = products / num**2 * len(filled) / (len(filled) - 1)
    assert found == pytest.approx(math.sqrt(max(0.0, variance)), abs=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20))
def test_with_one_play_of_each_task_the_error_is_the_usual_one(values):
    assert clustered_error([[value] for value in values]) == pytest.approx(
        stdev(values) / math.sqrt(len(values)), abs=1e-9
    )


@given(rewards, st.integers(2, 4))
def test_playing_the_same_again_does_not_make_the_mean_more_certain(clusters, times):
    assert clustered_error([cluster * times for cluster in clusters]) == pytest.approx(
        clustered_error(clusters), abs=1e-9, nan_ok=True
    )


@given(hits)
def test_the_interval_of_a_share_holds_it_and_stays_within_nothing_and_all(clusters):
    found = share_of(clusters)
    plays = list(itertools.chain(*clusters))
    if not plays:
        assert found is None
        return
    assert found.value == pytest.approx(sum(plays) / len(plays))
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1
    # Never surer than if all plays were independent.
    low, high = wilson(found.value, len(plays))
    assert found.low <= low + 1e-9
    assert found.high >= high - 1e-9


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_with_one_play_of_each_task_the_interval_of_a_share_is_wilsons(plays):
    found = share_of([[play] for play in plays])
    low, high = wilson(found.value, len(plays))
    assert found.low == pytest.approx(low, abs=0.02)
    assert found.high == pytest.approx(high, abs=0.02)


@given(st.integers(0, 50), st.integers(1, 50))
def test_the_ends_of_wilsons_interval_are_the_shares_that_just_fit(num_hits, num):
    share, z = min(num_hits, num) / num, 1.959963984540054
    for end in wilson(share, num):
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / num), abs=1e-9)


@given(hits, st.integers(1, 5))
def test_pass_at_k_of_an_evaluation_is_the_mean_over_tasks_with_enough_plays(clusters, k):
    enough = [cluster for cluster in clusters if len(cluster) >= k]
    found = pass_of(clusters, k)
    if not enough:
        assert found is None
        return
    assert found.value == pytest.approx(fmean(pass_at_k(len(one), sum(one), k) for one in enough))
    assert found.num_tasks == len(enough)
    if found.low is not None:
        assert 0 <= found.low <= found.value + 1e-12
        assert found.value - 1e-12 <= found.high <= 1


@pytest.mark.parametrize(
    ("degrees", "table"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (10, 2.228), (120, 1.980), (5000, 1.960)]
)
def test_students_quantiles_are_those_of_the_tables(degrees, table):
    assert student_quantile(0.975, degrees) == pytest.approx(table, abs=6e-4)


@given(st.floats(0, 8), st.integers(1, 60))
def test_students_distribution_is_the_integral_of_its_density(t, degrees):
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    steps, width = 400, t / 400
    density = [math.exp(log) * (1 + (i * width) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(steps + 1)]
    simpson = width / 3 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))
    assert student_cdf(t, degrees) == pytest.approx(0.5 + simpson, abs=1e-6)


def test_the_interval_of_the_mean_holds_the_truth_about_as_often_as_it_says():
    """Tasks of different difficulty, repeats of one alike: what the plain error would get wrong."""
    draw = random.Random(5)
    inside = plain = 0
    for _ in range(400):
        clusters = []
        for _ in range(12):
            task = draw.gauss(0, 1)
            clusters.append([task + draw.gauss(0, 0.3) for _ in range(4)])
        found = mean_of(clusters)
        inside += found.low <= 0 <= found.high
        flat = list(itertools.chain(*clusters))
        plain += abs(fmean(flat)) <= 1.96 * stdev(flat) / math.sqrt(len(flat))
    assert inside / 400 > 0.91
    assert plain / 400 < 0.8


def test_one_task_and_values_all_alike_have_no_interval_of_the_mean():
    assert mean_of([[0.0, 1.0]]).low is None
    assert mean_of([[1.0], [1.0]]).low is None
    assert mean_of([[], []]) is None
