"""Recipes: compiled op sequences, in memory and on disk, and the segment that collects their
ops."""

import hashlib
import time
from pathlib import Path

from hpu.emulator.card.counters import EmulatorCounters
from hpu.emulator.card.memory import Memory
from hpu.emulator.settings import EmulatorConfig, RuntimeVariables


class Recipes:
    """Compiles every signature once per process, or once per folder with a disk cache.

    A hit in memory or on disk is not a compilation: a restart with the same shapes is quick.
    """

    def __init__(
        self,
        config: EmulatorConfig,
        variables: RuntimeVariables,
        counters: EmulatorCounters,
        memory: Memory,
    ) -> None:
        self._config = config
        self._variables = variables
        self._journal = counters
        self._memory = memory
        self._compiled: set[str] = set()
        self._folder = None if "recipe-cache" in config.faults else variables.recipe_cache()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if variables.deletes_recipes():
                for path in self._folder.glob("*.recipe"):
                    path.unlink(missing_ok=True)

    def launch(self, signature: str, workspace: int) -> bool:
        """Run a recipe and compile it first if it is new; True if it was compiled."""
        compiled = signature not in self._compiled and not self._on_disk(signature)
        if compiled:
            self._compile(signature)
        else:
            self._journal.recipe_hits[signature] += 1
        self._compiled.add(signature)
        self._memory.reserve_workspace(int(workspace * self._config.workspace_ratio))
        self._journal.counts["launches"] += 1
        return compiled

    def _compile(self, signature: str) -> None:
        if self._config.reads_kernel_path and not self._variables.native("GC_KERNEL_PATH"):
            raise RuntimeError(
                "Graph compile failed. synStatus=synFail 26 [Generic failure]. synGraphCompile"
            )
        start = time.perf_counter()
        if self._config.compile_delay_s:
            time.sleep(self._config.compile_delay_s)
        microseconds = int((time.perf_counter() - start) * 1e6)
        self._journal.counts["compilations"] += 1
        self._journal.compile_us += microseconds
        self._journal.recipes.append((signature, microseconds))
        self._journal.recipe_misses[signature] += 1
        if self._folder is not None:
            self._path(self._folder, signature).touch()

    def _on_disk(self, signature: str) -> bool:
        return self._folder is not None and self._path(self._folder, signature).exists()

    def _path(self, folder: Path, signature: str) -> Path:
        return folder / f"{self._config.generation}-{self._config.release}-{signature}.recipe"


class Segment:
    """Ops collected since the last launch, in order: names, shapes, dtypes, scalars and data
    flow."""

    def __init__(self, recipes: Recipes) -> None:
        self._recipes = recipes
        self._ops: list[object] = []
        self._names: list[str] = []
        self._values: dict[int, int] = {}
        self._workspace = 0
        self.graph = ""
        """The compiled graph that the ops belong to, if any: part of the signature."""
        self.last_ops: tuple[str, ...] = ()
        """Names of the ops in the last closed segment, in order."""

    def add(self, op: str, parts: tuple[object, ...], largest: int) -> None:
        """Append an op; `largest` is the bytes of its largest output that needs workspace."""
        self._ops.append((op, parts))
        self._names.append(op)
        self._workspace = max(self._workspace, largest)

    def number(self, identity: int) -> int:
        """Number of the tensor `identity` in the segment, in order of first use."""
        return self._values.setdefault(identity, len(self._values))

    def has_ops(self) -> bool:
        """Whether ops have been collected."""
        return bool(self._ops)

    def close(self) -> bool:
        """Launch the collected ops, if any; True if a recipe was compiled."""
        if not self._ops:
            return False
        self.last_ops = tuple(self._names)
        self._names.clear()
        ops, workspace = self._ops, self._workspace
        self._ops, self._values, self._workspace = [], {}, 0
        signature = hashlib.sha256(repr((self.graph, ops)).encode()).hexdigest()[:32]
        return self._recipes.launch(signature, workspace)
