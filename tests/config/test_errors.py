"""Texts of errors."""

import pytest

from config.errors import bytes_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (17, "17 bytes"),
        (512, "0.50 KiB"),
        (1024, "1.00 KiB"),
        (17 * 2**20, "17.00 MiB"),
        (107_374_182, "102.40 MiB"),
        (107_374_183, "0.10 GiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (7152.3 * 2**30, "7152.30 GiB"),
    ],
)
def test_sizes_are_formatted_in_a_suitable_unit(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text
