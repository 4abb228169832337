"""LoRAInfo: description of a served adapter, without its weights."""

from typing import NamedTuple

from config.params.lora import NamedAdapter


class LoRAInfo(NamedTuple):
    """Description of a served adapter."""

    name: str
    path: str
    content: str
    """Hash of the adapter's files; equal if two names serve the same adapter."""
    rank: int
    """Largest rank of a module of the adapter."""
    num_bytes: int
    parent: str | None = None
    """Base model name that the adapter's owner gave (`base_model_name`); None: the served
    model's."""
    kind: str = ""
    """NamedAdapter.kind."""
    root: str = ""
    """AdapterFolder.root."""
    source: str = ""
    """Path or hub id of the adapter as the user wrote it, shown to clients."""

    @property
    def named(self) -> NamedAdapter:
        """NamedAdapter from which the adapter can be loaded again."""
        return NamedAdapter(self.name, self.path, self.parent, self.kind, self.root, self.source)
