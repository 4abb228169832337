"""config/loading/reference.py: the tables of the pages."""

import re

import pytest

from config.loading.reference import DOCS, PAGES, with_tables
from config.model.architectures import nearest


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_code(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")

    assert PAGES[name]() in page
    assert page == with_tables(name), "run `python -m config.loading.reference`"


def test_the_page_of_models_names_as_many_architectures_as_a_refusal_counts() -> None:
    tables = PAGES["models.md"]()
    first_cells = re.findall(r"^\| `(\w+)`", tables, re.MULTILINE)
    listed = re.findall(r"`(\w+)`", tables.rpartition("take images.")[2])
    names = {*first_cells, *listed}

    assert len(names) == len(first_cells) + len(listed)
    assert nearest("Foo") == f"docs/models.md lists the {len(names)} architectures that are served"
