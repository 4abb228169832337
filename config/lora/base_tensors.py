"""BaseTensors: finds base-model tensors in the checkpoint files."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from config.checkpoint.safetensors_files import StoredTensor, read_header, weight_files
from config.checkpoint.weight_maps.base import WeightMap
from config.errors import ConfigError
from config.lora.adapter_folder import DTYPES


class TensorLocation(NamedTuple):
    """A tensor and its file."""

    file: Path
    tensor: StoredTensor


class BaseTensors:
    """The tensors in the files of a folder."""

    def __init__(self, folder: Path, weight_map: WeightMap) -> None:
        self._folder = folder
        self._weight_map = weight_map
        self.aliases: dict[str, str] = {}
        """Tensor name -> the name under which the checkpoint stores it."""

    def find(self, name: str) -> TensorLocation | None:
        """Location of the tensor with the mapped name `name` (WeightMap.map_name); None if the
        checkpoint has no floating-point tensor of this name."""
        return self._places.get(name) or self._places.get(self.aliases.get(name, ""))

    @cached_property
    def _places(self) -> dict[str, TensorLocation]:
        try:
            files = weight_files(self._folder)
        except ConfigError:
            # There are no weight files: random weights, or a GGUF file that is not converted.
            return {}
        return {
            self._weight_map.map_name(tensor.name): TensorLocation(file, tensor)
            for file in files
            for tensor in read_header(file)
            if tensor.dtype in DTYPES
        }
