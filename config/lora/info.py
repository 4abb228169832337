"""LoRAInfo: a served adapter, for processes that do not hold its weights."""

from typing import NamedTuple

from config.params.lora import NamedAdapter


class LoRAInfo(NamedTuple):
    """A served adapter."""

    name: str
    path: str
    content: str
    """Hash of the adapter's files; equal for two names of the same adapter."""
    rank: int
    """Largest rank of the adapter."""
    num_bytes: int
    parent: str | None = None
    """Name of the base model as its owner gave it; None: the served model's."""
    kind: str = ""
    """NamedAdapter.kind."""
    root: str = ""
    """AdapterFolder.root."""
    source: str = ""
    """Folder of the adapter as its user wrote it, which clients may see."""

    @property
    def named(self) -> NamedAdapter:
        """The NamedAdapter that loads the adapter again."""
        return NamedAdapter(self.name, self.path, self.parent, self.kind, self.root, self.source)
