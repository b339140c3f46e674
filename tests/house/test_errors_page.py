"""docs/errors.md has a section for every error that programs can catch, in the words of its docstring."""

import inspect
import re
from pathlib import Path

import allranks

PAGE = (Path(__file__).parents[2] / "docs/errors.md").read_text()


def public() -> dict[str, type[BaseException]]:
    values = {name: getattr(allranks, name) for name in allranks.__all__}
    return {name: each for name, each in values.items() if isinstance(each, type) and issubclass(each, BaseException)}


def test_every_error_has_a_section() -> None:
    sections = dict(re.findall(r"^## (\w+Error|Worker\w+)\n\n(.*?)(?=\n## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    names = {each.__name__ for each in public().values()}
    assert set(sections) == names
    for name, section in sections.items():
        meaning = (inspect.getdoc(getattr(allranks, name)) or "").split("\n\n")[0]
        assert " ".join(section.split("\n\n")[0].split()) == " ".join(meaning.replace("``", "`").split()), name
        assert "Causes:\n\n- " in section or name == "AllranksError", name


def test_names_of_torch_are_listed_with_what_they_are() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| \[(\w+)\]", PAGE, re.MULTILINE))
    assert rows == {name: each.__name__ for name, each in public().items() if each.__name__ != name}
