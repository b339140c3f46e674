"""Statistics of calls from constructed groups: the table, the JSON, and text for the parser of Prometheus."""

import pytest

from allranks._trace.stats import GroupStats, JobStats, RankStats, VerbStats, prometheus


def rank(number, *groups, host="here", seconds=100.0):
    return RankStats(number, host, seconds, groups)


def group(late, name="world", ranks=(0, 1, 2), compared=1000, **verbs):
    return GroupStats(name, ranks, verbs or {"all_reduce": VerbStats(compared, 4096, 20.0, 15.0)}, compared, late)


def test_table_lists_calls_and_late_ranks():
    world = group({0: (100, 0.1), 2: (900, 12.0)})
    lines = JobStats([rank(0, world), rank(1, world), rank(2, world, host="node1")]).lines()
    assert lines == [
        "3 ranks, 100.0 s, 20% of it in calls",
        "              calls     bytes  seconds  waiting  of the time",
        "  all_reduce  3,000  12.0 KiB    60.00    45.00        20.0%",
        "  arrived last  group  calls     of  seconds  of the time",
        "  rank 2        world    900  1,000    12.00        12.0%",
        "  rank 0        world    100  1,000     0.10         0.1%",
        "warning: rank 2 (node1) arrived last in 900 of 1,000 calls of group 'world', by 12.0 s in total: 12% of the"
        " time",
    ]


@pytest.mark.parametrize(
    ("ranks", "times", "seconds", "stands_out"),
    [
        ((0, 1, 2), 501, 5.1, True),
        ((0, 1, 2), 500, 5.1, False),  # not more than half
        ((0, 1, 2), 900, 4.9, False),  # less than 5% of the time
        ((0, 1), 600, 50.0, False),  # with two ranks, each is expected to be last in half of the calls
        ((0, 1), 670, 50.0, True),
    ],
)
def test_rank_stands_out_if_often_and_long_late(ranks, times, seconds, stands_out):
    stats = JobStats([rank(0, group({1: (times, seconds)}, ranks=ranks))])
    assert [each.stands_out for each in stats.late] == [stands_out]
    assert len(stats.warnings()) == stands_out


def test_few_calls_give_no_warning():
    assert JobStats([rank(0, group({1: (10, 50.0)}, compared=10))]).warnings() == []


def test_counts_come_from_rank_with_most_compared_calls():
    ranks = [rank(0, group({1: (3, 0.3)}, compared=5)), rank(1, group({1: (5, 0.5)}, compared=8))]
    (late,) = JobStats(ranks).late
    assert (late.times, late.compared) == (5, 8)


def test_successive_groups_of_one_name_are_summed():
    first, second = group({1: (3, 0.3)}, compared=5), group({1: (4, 0.5), 2: (1, 0.1)}, compared=5)
    stats = JobStats([rank(0, first, second)])
    assert [(late.rank, late.times, late.compared) for late in stats.late] == [(1, 7, 10), (2, 1, 10)]
    assert stats.verbs[0].calls == 10


def test_job_without_calls_has_empty_statistics():
    stats = JobStats([])
    assert stats.lines() == ["no rank has made a call"]
    assert stats.as_json() == {"ranks": 0, "seconds": 0.0, "share_in_calls": 0, "verbs": {}, "late": [], "workers": []}
    assert JobStats([rank(0)]).lines() == ["no rank has made a call"]
    assert "allranks_ranks 0\n" in prometheus([])


def test_json_contains_verbs_and_late_ranks():
    stats = JobStats([rank(0, group({1: (900, 12.0)}))]).as_json()
    assert stats["verbs"]["all_reduce"] == {
        "verb": "all_reduce",
        "calls": 1000,
        "bytes": 4096,
        "seconds": 20.0,
        "waiting": 15.0,
        "share": 0.2,
    }
    assert stats["late"][0]["stands_out"] is True


def test_prometheus_parser_reads_the_text():
    from prometheus_client.parser import text_string_to_metric_families

    odd = 'a "name" \\ of\nmine'
    world = group({2: (900, 12.0)}, all_reduce=VerbStats(7, 28, 0.5, 0.25), send=VerbStats(2, 8, 1e-7, 0.0))
    text = prometheus([rank(1, group({}, name=odd, ranks=(1,)), world), rank(0, world, host="node1", seconds=1 / 3)])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith("allranks_") and family.documentation for name, family in families.items())
    assert families["allranks_calls"].type == "counter"
    assert families["allranks_rank_seconds"].type == "gauge"
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    mine = [("group", "world"), ("host", "node1"), ("rank", "0"), ("verb", "send")]
    assert samples[("allranks_calls_total", *mine)] == 2
    assert samples[("allranks_call_seconds_total", *mine)] == pytest.approx(1e-7, rel=1e-12)
    assert samples["allranks_rank_seconds", ("host", "node1"), ("rank", "0")] == pytest.approx(1 / 3, rel=1e-12)
    assert samples["allranks_ranks",] == 2
    assert samples["allranks_calls_total", ("group", odd), ("host", "here"), ("rank", "1"), ("verb", "all_reduce")]
    assert samples["allranks_last_calls_total", ("group", "world"), ("host", ""), ("rank", "2")] == 900
    assert samples["allranks_late_seconds_total", ("group", "world"), ("host", ""), ("rank", "2")] == 12
