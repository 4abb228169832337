"""LoRAInfo: an adapter that is served, as processes without its weights know it."""

from typing import NamedTuple

from config.params.lora import NamedAdapter


class LoRAInfo(NamedTuple):
    """An adapter that is served."""

    name: str
    path: str
    content: str
    """Hash of its files: the same for two names of the same adapter."""
    rank: int
    """Its largest one."""
    num_bytes: int
    parent: str | None = None
    """Name of the base model as its owner gave it; None: the served model's."""
    kind: str = ""
    """NamedAdapter.kind."""
    root: str = ""
    """AdapterFolder.root."""
    source: str = ""
    """Its folder as its user wrote it, which clients may see."""

    @property
    def named(self) -> NamedAdapter:
        """What loads it again."""
        return NamedAdapter(self.name, self.path, self.parent, self.kind, self.root, self.source)
