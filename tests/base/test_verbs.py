"""Consistency of the table of collectives with the core (whose numbers traces contain) and with public signatures."""

import inspect
import re
from pathlib import Path

import pytest

import allranks
from allranks._base.verbs import COMMAND, VERBS, Verb
from allranks._trace import reader

NAMES = Path(__file__).parents[2] / "core/python/names.h"


def test_verbs_have_the_same_order_as_in_the_core() -> None:
    found = re.search(r"kVerbs = \{(.*?)\};", NAMES.read_text(), re.DOTALL)
    assert found
    none, *names = re.findall(r'"(\w+)"', found[1])
    assert none == "none"
    assert names == list(VERBS)
    assert (COMMAND, *VERBS) == reader.VERBS


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_verb_properties_match_the_public_signature(verb: Verb) -> None:
    names = list(inspect.signature(getattr(allranks, verb.name)).parameters)
    assert verb.reduces == ("op" in names)
    if verb.name not in ("send", "recv"):
        assert (verb.root or None) == next((name for name in ("src", "dst") if name in names), None)
    lists = sum(name.endswith("_list") or name in ("tensor_list",) for name in names)
    assert lists == (verb.given == 0) + (verb.results == 0)
