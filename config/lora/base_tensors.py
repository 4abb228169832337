"""BaseTensors: finds the tensors of a base model in its checkpoint files."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from config.checkpoint.safetensors_files import StoredTensor, read_header, weight_files
from config.checkpoint.weight_maps.base import WeightMap
from config.errors import ConfigError
from config.lora.adapter_folder import DTYPES


class Place(NamedTuple):
    """A tensor and its file."""

    file: Path
    tensor: StoredTensor


class BaseTensors:
    """The tensors in the files of a folder."""

    def __init__(self, folder: Path, weight_map: WeightMap) -> None:
        self._folder = folder
        self._weight_map = weight_map
        self.aliases: dict[str, str] = {}
        """Names of tensors that the checkpoint stores under other names."""

    def find(self, name: str) -> Place | None:
        """Place of the tensor called `name` by WeightMap.map_name; None if the checkpoint has no
        tensor of floating-point numbers with this name."""
        return self._places.get(name) or self._places.get(self.aliases.get(name, ""))

    @cached_property
    def _places(self) -> dict[str, Place]:
        try:
            files = weight_files(self._folder)
        except ConfigError:
            # The base model is a GGUF file.
            return {}
        return {
            self._weight_map.map_name(tensor.name): Place(file, tensor)
            for file in files
            for tensor in read_header(file)
            if tensor.dtype in DTYPES
        }
