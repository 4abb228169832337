"""Rules that cannot be seen in a single file: layers, import cycles, ownership of package names."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("server", "engine", "hpu", "config")

MAY_IMPORT = {
    "server": ("server", "engine.client", "engine.transport.messages", "config"),
    "engine": ("engine", "hpu.protocol", "hpu.bucketing", "config"),
    "hpu": ("hpu", "config"),
    "config": ("config",),
}
"""Prefixes of the modules that the files of a layer may import."""

EXCEPTIONS = {
    "server.cli.buckets": ("engine.reports.buckets", "engine.reports.bucket_plot"),
    "server.cli.doctor": ("engine.reports.doctor",),
    "server.app.reference": ("engine.selftest.fallbacks",),
    "server.cli.selftest": ("engine.reports.doctor", "engine.selftest"),
    "server.offline.engines": ("engine.reports.doctor", "engine.selftest.start"),
    "server.cli.plan": (
        "engine.reports.buckets",
        "engine.reports.doctor",
        "engine.reports.plan",
        "engine.reports.presets",
    ),
    "server.cli.presets": (
        "engine.reports.doctor",
        "engine.reports.plan",
        "engine.reports.presets",
    ),
    "engine.reports.presets": ("hpu.doctor",),
    # A request's template is rendered in the disposable process that grammars use.
    "server.text.chat_template": ("engine.process.isolation",),
    "server.text.isolated_template": ("engine.process.isolation",),
    # A tokenizer without a bound encodes in a disposable process.
    "server.text.bounded_encoder": ("engine.process.isolation",),
    # A quantization step runs in a process that ends with the command.
    "server.cli.quantize": ("engine.process.child_process",),
    # A process answers probes while the tokenizer library blocks the API server.
    "server.process.start_probes": ("engine.process.child_process",),
    # Images are decoded in disposable processes.
    "server.multimodal.processor": ("engine.process.isolation",),
    # The launcher divides the cores among the engines.
    "engine.client.launcher": ("hpu.host",),
    "engine.reports.doctor": ("hpu.host", "hpu.gaudi_devices", "hpu.doctor"),
    "engine.reports.plan": (
        "hpu.worker.card_plan",
        "hpu.gaudi_devices",
        "hpu.model_loader.size_estimate",
    ),
    # The child process runs the checks of the self-test, like an executor runs workers.
    "engine.selftest.child": ("hpu.selftest",),
    "engine.selftest.fallbacks": ("hpu.selftest.base",),
    "engine.selftest.results": ("hpu.selftest.base",),
    "engine.selftest.runner": ("hpu.selftest.base",),
    "engine.selftest.start": ("hpu.selftest.base", "hpu.doctor", "hpu.emulator.settings"),
    "engine.executors.select": ("hpu.worker.worker",),
    "engine.executors.inproc": ("hpu.worker.worker",),
    "engine.executors.external_launcher": ("hpu.worker.worker",),
    "engine.executors.worker_main": ("hpu.worker.worker", "hpu.numa"),
}
"""Prefixes of further modules that a file may import."""

RESERVED = {
    "engine.client.inproc": ("server.offline", "engine"),
    # Models and layers import no kernel library; the back end replaces their operations.
    "hpu.native": ("hpu.native", "hpu.backends.cpu"),
}
"""Modules, and the only modules of this project that may import them or modules below them."""

INSIDE_HPU = {
    "hpu.ops": ("hpu.ops", "hpu.quantization"),
    "hpu.layers": ("hpu.layers", "hpu.ops", "hpu.quantization", "hpu.distributed"),
    "hpu.model_loader": ("hpu.model_loader", "hpu.distributed"),
    "hpu.models": (
        *("hpu.models", "hpu.layers", "hpu.ops", "hpu.quantization"),
        *("hpu.distributed", "hpu.model_loader"),
    ),
}
"""Models and their parts import no back end, no kernel library and no runner: these parts of hpu/
may import only the listed parts."""

ONE_WAY = ("server", "engine", "hpu", "config")
"""Layers whose folders import each other in one direction only."""

TWO_WAY = {
    # registry.py chooses the method of built layers, which hold an unquantized method by default.
    ("hpu.quantization", "hpu.layers"),
    # registry.py also checks whether the CPU has a packed matmul.
    ("hpu.quantization", "hpu.ops"),
}
"""(folder, imported folder): accepted import cycles in ONE_WAY layers."""

ONLY_IN = {
    "habana_frameworks": ("hpu.backends.gaudi", "hpu.ops", "hpu.emulator"),
    "zmq": ("engine.transport.channels",),
    "ray": ("engine.executors.ray",),
    "llmcompressor": ("hpu.quantization.compress",),
    "compressed_tensors": ("hpu.quantization.compress",),
    "pydantic": ("server",),
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server",),
    "torch": ("hpu", "engine.structured_output"),
}
"""Third-party packages, and the only modules of this project that may import them."""

SPAWNED = (
    "engine.executors.select",
    "engine.executors.worker_main",
    "engine.core.engine_process",
    "hpu.backends.hpu",
    "hpu.models.registry",
    "hpu.multimodal.select",
    "server.cli.main",
    "server.process.supervisor",
)
"""Files that may import inside a function, because unused choices must not be loaded, or because
other work starts first."""


class Import(NamedTuple):
    """An import statement: `module` as written, the imported `names`, and its place."""

    module: str
    names: tuple[str, ...]
    line: int
    is_local: bool
    """Whether the import is inside a function."""
    is_for_types: bool
    """Whether the import is under `if TYPE_CHECKING`."""
    level: int


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(_walk(tree_of(module), is_local=False, is_for_types=False))


def _walk(node: ast.AST, *, is_local: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), child.lineno, is_local, is_for_types, 0)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            yield Import(
                child.module or "", names, child.lineno, is_local, is_for_types, child.level
            )
        yield from _walk(
            child,
            is_local=is_local
            or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)),
            is_for_types=is_for_types
            or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)),
        )


def targets(found: Import) -> list[str]:
    """Modules that an import loads: `from engine import client` loads engine.client."""
    below = [f"{found.module}.{name}" for name in found.names]
    return [name for name in below if name in FILES] or [found.module]


def is_below(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


def ours() -> Iterator[tuple[str, Import, str]]:
    """(importing module, import, imported module) for all imports of this project's modules."""
    for module in FILES:
        for found in imports_of(module):
            for target in targets(found):
                if target.partition(".")[0] in FLOORS:
                    yield module, found, target


@cache
def owners() -> dict[str, set[str]]:
    """Distributions that provide each top-level name. In Python 3.10, the standard library's
    function omits distributions that do not list their names."""
    found: dict[str, set[str]] = {}
    for distribution in distributions():
        names = set((distribution.read_text("top_level.txt") or "").split())
        if not names:
            files = [file for file in distribution.files or () if file.suffix == ".py"]
            names = {file.parts[0].removesuffix(".py") for file in files}
        for name in names:
            found.setdefault(name, set()).add(distribution.metadata["Name"])
    return found


def test_the_checks_find_modules() -> None:
    assert {module.partition(".")[0] for module in FILES} == set(FLOORS)
    assert len(list(ours())) > 50


def test_imports_point_downwards_or_sideways() -> None:
    wrong = []
    for module, found, target in ours():
        allowed = (*MAY_IMPORT[module.partition(".")[0]], *EXCEPTIONS.get(module, ()))
        reserved = (may for root, may in RESERVED.items() if is_below(target, (root,)))
        if not is_below(target, allowed) or not all(is_below(module, may) for may in reserved):
            wrong.append(f"{FILES[module].relative_to(ROOT)}:{found.line} imports {target}")

    assert wrong == []


def test_models_import_no_back_end_and_no_kernel_library() -> None:
    wrong = []
    for module, found, target in ours():
        part = ".".join(module.split(".")[:2])
        allowed = INSIDE_HPU.get(part)
        if allowed and target.startswith("hpu.") and not is_below(target, allowed):
            wrong.append(f"{FILES[module].relative_to(ROOT)}:{found.line} imports {target}")

    assert wrong == []


def test_files_have_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {module: set() for module in FILES}
    for module, found, target in ours():
        if not found.is_local and target in FILES:
            graph[module].add(target)

    circles = _cycles(graph)

    assert circles == []


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
            return
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, [*trail, module])
        done.add(module)

    for module in graph:
        visit(module, [])
    return found


@pytest.mark.parametrize("floor", ONE_WAY)
def test_folders_have_no_import_cycles(floor: str) -> None:
    # A file beside folders counts as a folder.
    parents = {module.rpartition(".")[0].rpartition(".")[0] for module in FILES}
    folders = {
        module: module if module.rpartition(".")[0] in parents else module.rpartition(".")[0]
        for module in FILES
    }
    graph: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for module, _, target in ours():
        if is_below(module, (floor,)) and is_below(target, (floor,)) and target in FILES:
            importing, imported = folders[module], folders[target]
            if importing != imported and (importing, imported) not in TWO_WAY:
                graph[importing].add(imported)

    circles = _cycles(graph)

    assert len(graph) > 5
    assert circles == []


def test_import_cycles_are_detected() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}

    circles = _cycles(graph)

    assert circles == [["b", "c", "b"]]


def test_nothing_is_imported_relatively() -> None:
    wrong = [
        f"{module}:{found.line}" for module in FILES for found in imports_of(module) if found.level
    ]

    assert wrong == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_third_party_packages_are_imported_only_where_allowed(package: str) -> None:
    wrong = [
        f"{FILES[module].relative_to(ROOT)}:{found.line}"
        for module in FILES
        for found in imports_of(module)
        if found.module.partition(".")[0] == package
        and not found.is_for_types
        and not is_below(module, ONLY_IN[package])
    ]

    assert wrong == []


def test_only_config_env_reads_the_environment() -> None:
    wrong = []
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            taken = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in ("environ", "getenv") for alias in node.names)
            )
            if (named or taken) and module != "config.loading.env":
                wrong.append(f"{FILES[module].relative_to(ROOT)}:{node.lineno}")

    assert wrong == []


def test_only_listed_files_import_inside_functions() -> None:
    wrong = [
        f"{FILES[module].relative_to(ROOT)}:{found.line}"
        for module in FILES
        for found in imports_of(module)
        if found.is_local and module not in SPAWNED
    ]

    assert wrong == []


def test_every_directory_is_a_package() -> None:
    folders = {path.parent for path in FILES.values()}

    missing = [
        str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()
    ]

    assert missing == []


def test_an_init_file_describes_its_folder_in_a_few_lines() -> None:
    wordy = [
        module
        for module, path in FILES.items()
        if path.name == "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) > 6
    ]

    assert wordy == ["server"]  # server/__init__.py also holds the check of the package names.


def test_every_file_has_a_docstring() -> None:
    wrong = [module for module, path in FILES.items() if not ast.get_docstring(tree_of(module))]

    assert wrong == []


@pytest.mark.parametrize("name", FLOORS)
def test_no_other_distribution_owns_a_package_name(name: str) -> None:
    assert owners().get(name, set()) <= {"gaudiserve"}


def test_imported_packages_are_declared() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = pyproject.partition("dependencies = [")[2].partition("]\n")[0]
    # Packages provided by the user, by fastapi and pydantic as their dependencies, by the device's
    # vendor, or by an optional extra.
    elsewhere = {"torch", "starlette", "pydantic_core", "habana_frameworks", *FLOORS}
    elsewhere |= {"ray", "llmcompressor", "compressed_tensors", "datasets", "opentelemetry"}
    wrong = set()
    for module in FILES:
        for found in imports_of(module):
            package = found.module.partition(".")[0]
            if package in elsewhere or package in sys.stdlib_module_names:
                continue
            names = {name.lower().replace("_", "-") for name in owners().get(package, {"?"})}
            if not any(f'"{name}>=' in declared for name in names):
                wrong.add(f"{module} imports {package}")

    assert wrong == set()
