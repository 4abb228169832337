"""Registries of kinds, such as tool parsers, model families and devices. They are collected from
the modules of a folder, so a new kind needs only a new file."""

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

from config.errors import ConfigError

K_co = TypeVar("K_co", covariant=True)


class Kinds(Generic[K_co]):
    """Registry of the kinds in the modules of `package` and its subpackages. A module lists its
    kinds by name in the mapping `attribute`; modules without the attribute are skipped. Modules
    with kinds must not read `all` while they are imported."""

    def __init__(self, package: str, attribute: str, noun: str) -> None:
        """`noun`: word for a kind in error messages, such as "tool parser"."""
        self._package = package
        self._attribute = attribute
        self._noun = noun
        self._modules: dict[str, str] = {}
        """Name -> module of the kind."""

    @cached_property
    def all(self) -> Mapping[str, K_co]:
        """Name -> kind, in the order of the files. The first access imports the modules."""
        found: dict[str, K_co] = {}
        for module in modules_of(self._package):
            for name, kind in getattr(import_module(module), self._attribute, {}).items():
                assert name not in found, f"{module} defines the {self._noun} {name} again"
                found[name] = kind
                self._modules[name] = module
        return found

    def __getitem__(self, name: str) -> K_co:
        """The kind `name`. Raises ConfigError for an unknown name."""
        return self.all[self.checked(name)]

    def checked(self, name: str) -> str:
        """Return `name`. Raises ConfigError, which lists all names, if it is unknown."""
        if name not in self.all:
            known = ", ".join(sorted(self.all))
            raise ConfigError(f"{name!r} is not a known {self._noun}, it must be one of {known}")
        return name

    def counterpart(self, name: str, package: str, attribute: str) -> Any:
        """Entry `name` of the mapping `attribute` in the module of `package` that has the same file
        name as the kind's own module, for example the backend of a device. Imports only that module
        of `package`. Raises ConfigError for an unknown name."""
        file = self._modules[self.checked(name)].rpartition(".")[2]
        return getattr(import_module(f"{package}.{file}"), attribute)[name]


def modules_of(package: str) -> Iterator[str]:
    """Names of all modules in `package` and its subpackages, without registry.py modules, which
    read the kinds. Imports only the packages."""
    path = import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}."):
        if not module.ispkg and not module.name.endswith(".registry"):
            yield module.name
