"""Configuration of an `LLM`: its keywords, and the settings that the self-test selects."""

from collections.abc import Mapping
from typing import Any

from config.loading.env import environment
from config.loading.sources import Loaded, from_keywords
from engine.reports.doctor import this_machine
from engine.selftest.start import with_selftest

SWITCHES = {"on": True, "off": False}


def with_fallbacks(keywords: Mapping[str, Any]) -> Loaded:
    """The configuration of `keywords`, and of the settings that avoid failed checks of the
    self-test, with the log lines of `serve`."""
    loaded = from_keywords(**keywords)

    def change(flags: Mapping[str, str]) -> Loaded:
        values = {
            name.replace("-", "_"): SWITCHES.get(value, value) for name, value in flags.items()
        }
        return from_keywords(**{**keywords, **values})

    return with_selftest(loaded, loaded, this_machine(environment()), change)
