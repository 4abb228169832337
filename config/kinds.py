"""Kinds of parsers, formats, families and devices, found by the files of a folder: a new kind is a
new file, and no list names it."""

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

from config.errors import ConfigError

K_co = TypeVar("K_co", covariant=True)


class Kinds(Generic[K_co]):
    """All kinds in the modules of `package` and of its subpackages. A module lists its kinds by
    name in the mapping `attribute`; a module without the attribute holds none. No module with kinds
    may read `all` while it is imported."""

    def __init__(self, package: str, attribute: str, noun: str) -> None:
        """`noun`: what error messages call a kind, such as "tool parser"."""
        self._package = package
        self._attribute = attribute
        self._noun = noun
        self._modules: dict[str, str] = {}
        """Name -> module of the kind."""

    @cached_property
    def all(self) -> Mapping[str, K_co]:
        """Name -> kind, in the order of the files. The first read imports every module."""
        found: dict[str, K_co] = {}
        for module in modules_of(self._package):
            for name, kind in getattr(import_module(module), self._attribute, {}).items():
                assert name not in found, f"{module} defines the {self._noun} {name} again"
                found[name] = kind
                self._modules[name] = module
        return found

    def __getitem__(self, name: str) -> K_co:
        """The kind `name`. Raises ConfigError like `checked`."""
        return self.all[self.checked(name)]

    def checked(self, name: str) -> str:
        """`name`. Raises ConfigError with the names of all kinds for an unknown name."""
        if name not in self.all:
            known = ", ".join(sorted(self.all))
            raise ConfigError(f"{name!r} is no {self._noun}, it must be one of {known}")
        return name

    def half(self, name: str, package: str, attribute: str) -> Any:
        """The other half of the kind `name`, such as its tensors: the entry `name` of `attribute`
        in the file of `package` that has the name of the kind's file. Imports only this file.
        Raises ConfigError like `checked`."""
        file = self._modules[self.checked(name)].rpartition(".")[2]
        return getattr(import_module(f"{package}.{file}"), attribute)[name]


def modules_of(package: str) -> Iterator[str]:
    """Names of all modules in `package` and in its subpackages, but for each registry.py, which
    reads the kinds. Imports the packages only."""
    path = import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}."):
        if not module.ispkg and not module.name.endswith(".registry"):
            yield module.name
