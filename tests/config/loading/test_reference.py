"""config/loading/reference.py: the tables of the pages."""

import pytest

from config.loading.reference import DOCS, PAGES, with_tables


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_code(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")

    assert PAGES[name]() in page
    assert page == with_tables(name), "run `python -m config.loading.reference`"
