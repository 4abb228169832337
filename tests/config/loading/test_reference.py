"""config/loading/reference.py: the generated tables of the documentation."""

import re

import pytest

from config.loading.flags import FLAGS
from config.loading.reference import DOCS, PAGES, with_tables
from config.loading.values import Given, convert
from config.model.architectures import nearest


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_tables_of_a_page_are_current(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")

    assert PAGES[name]() in page
    assert page == with_tables(name), "run `python -m config.loading.reference`"


def test_the_models_page_lists_as_many_architectures_as_the_error_states() -> None:
    tables = PAGES["models.md"]()
    in_tables = re.findall(r"^\* [^`]+: `(\w+)`", tables, re.MULTILINE)
    listed = re.findall(r"`(\w+)`", tables.rpartition("take images.")[2])
    names = {*in_tables, *listed}

    assert len(names) == len(in_tables) + len(listed)
    assert nearest("Foo") == f"docs/models.md lists the {len(names)} supported architectures"


def test_a_size_in_the_help_has_a_unit_that_the_flag_accepts() -> None:
    shown = {flag.key: flag.shown_default for flag in FLAGS}
    sizes = [flag for flag in FLAGS if flag.kind is int and flag.default is not None]
    read = [convert(flag, Given(flag.key, flag.shown_default, "test")) for flag in sizes]

    assert read == [flag.default for flag in sizes]
    assert (shown["max-body-bytes"], shown["h11-max-incomplete-event-size"]) == ("64M", "64K")
    assert (shown["emulator-memory"], shown["fsdpa-slice-threshold"]) == ("4G", "8192")
