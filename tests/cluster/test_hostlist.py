"""Host lists in every format that schedulers and users write."""

import pytest

from allranks._base.errors import ConfigError
from allranks._cluster.hostlist import (
    Slots,
    count_lines,
    expand_counts,
    expand_hosts,
    expand_numbers,
    parse_hostfile,
    parse_hosts,
    parse_pairs,
    parse_pe_hostfile,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("a[01-03,07]", "a01 a02 a03 a07"),
        ("a[01-03,07],gpu-[1-2]n[5-6]", "a01 a02 a03 a07 gpu-1n5 gpu-1n6 gpu-2n5 gpu-2n6"),
        ("a[8-11].cluster.org", "a8.cluster.org a9.cluster.org a10.cluster.org a11.cluster.org"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("b,a, c", "b a c"),
    ],
)
def test_slurm_host_lists_are_expanded(text: str, names: str) -> None:
    assert expand_hosts(text, "X") == names.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a[1-3", "its brackets do not match"),
        ("a]1[", "its brackets do not match"),
        ("a[[1]]", "its brackets do not match"),
        ("a,,b", "a name is missing"),
        ("", "a name is missing"),
        ("a[3-1]", "'3-1' is not a range of numbers"),
        ("a[x]", "'x' is not a range of numbers"),
        ("a[]", "'' is not a range of numbers"),
        ("a b", "'a b' is not a host name"),
        ("-oProxyCommand=x", "is not a host name"),
        ("a[0-99999999999]", "more than 1048576"),
        ("a[0-9999]b[0-9999]", "more than 1048576"),
    ],
)
def test_invalid_host_list_names_variable_and_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_hosts(text, "SLURM_STEP_NODELIST")
    assert why in str(caught.value)
    assert "SLURM_STEP_NODELIST" in str(caught.value)


def test_counts_and_number_ranges_are_expanded() -> None:
    assert expand_counts("2(x2),1", "X") == [2, 2, 1]
    assert expand_counts("4", "X") == [4]
    assert expand_numbers("20000-20002,20007", "X") == [20000, 20001, 20002, 20007]
    for wrong in ("2x2", "", "2(x2)1", "1(x9999999999)"):
        with pytest.raises(ConfigError):
            expand_counts(wrong, "X")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", "a"),
        ("a:4,b:2", "a:4 b:2"),
        ("n[1-2]:4,gpu", "n1:4 n2:4 gpu"),
        ("a,a,b", "a:2 b:1"),
        ("a:2,a:3", "a:5"),
        ("me@a:2", "me@a:2"),
        ("10.0.0.1:2", "10.0.0.1:2"),
    ],
)
def test_hosts_option_is_parsed(text: str, hosts: str) -> None:
    assert " ".join(map(str, parse_hosts(text, "--hosts"))) == hosts


def test_ipv6_addresses_are_parsed() -> None:
    assert parse_hosts("[fd77::1]:2,fd77::2,[fd77::3]", "--hosts") == (
        Slots("fd77::1", 2),
        Slots("fd77::2"),
        Slots("fd77::3"),
    )


def test_host_file_formats_are_parsed() -> None:
    text = """
    # our cluster
    node0 slots=4          # a login node, too
    node1 slots=2 max_slots=8
    node2:3
    node3 5
    n[8-9] slots=1
    """
    assert " ".join(map(str, parse_hostfile(text, "hosts"))) == "node0:4 node1:2 node2:3 node3:5 n8:1 n9:1"
    assert parse_hostfile("a\nb\n", "hosts") == (Slots("a"), Slots("b"))
    assert parse_hostfile("a\r\nb\r\na\r\n", "hosts") == (Slots("a", 2), Slots("b", 1))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "hosts names no host"),
        ("# nothing", "hosts names no host"),
        ("a\nb slots=x", "hosts, line 2: 'slots=x' is not known"),
        ("a:x", "'x' is not a number of slots"),
        ("a colour=red", "hosts, line 1: 'colour=red' is not known"),
        ("a;b", "is not a host name"),
    ],
)
def test_invalid_host_file_names_line_and_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    assert why in str(caught.value)


def test_scheduler_host_formats_are_parsed() -> None:
    assert count_lines("a\na\nb\na\n", "PBS_NODEFILE") == (Slots("a", 3), Slots("b", 1))
    assert parse_pairs("login 1 a 4 b 4", "LSB_MCPU_HOSTS") == (Slots("login", 1), Slots("a", 4), Slots("b", 4))
    pe = "a.org 4 all.q@a.org UNDEFINED\nb.org 2 all.q@b.org <NULL>\na.org 1 long.q@a.org UNDEFINED\n"
    assert parse_pe_hostfile(pe, "PE_HOSTFILE") == (Slots("a.org", 5), Slots("b.org", 2))
    for parse, wrong in ((count_lines, "a b"), (parse_pairs, "a 4 b"), (parse_pairs, "a x"), (parse_pe_hostfile, "a")):
        with pytest.raises(ConfigError):
            parse(wrong, "X")
