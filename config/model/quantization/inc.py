"""Configuration of Intel Neural Compressor (INC) in the file QUANT_CONFIG: the fields that are
checked before the compressor reads it, and the measurement files. Keys, defaults and file names:
_quant_common/quant_config.py of fp8_quant in intel/neural-compressor."""

from dataclasses import dataclass
from pathlib import Path

from config.errors import ConfigError
from config.json_text import json_problem, parse_json
from config.model.json_fields import MAX_JSON_BYTES
from config.whole_files import read_limited

INC = "inc"
"""Value of --quantization that selects Intel Neural Compressor."""
MODULE, PACKAGE = "neural_compressor", "neural-compressor-pt"
"""Import name and package name of the compressor."""
MEASURE, QUANTIZE = MODES = ("MEASURE", "QUANTIZE")
VARIABLE = "QUANT_CONFIG"
UNMEASURED_METHODS = ("UNIT_SCALE", "HW_ALIGNED_SINGLE_SCALE")
"""Scale methods that need no measurements."""


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Validated INC configuration file."""

    path: str
    mode: str
    """MEASURE or QUANTIZE."""
    dump_stats_path: str
    """Path prefix of all measurement files."""
    observer: str
    needs_measures: bool
    """Whether quantization needs measurement files."""
    names_ranks: bool
    """Whether measurement files exist per rank."""
    scale_method: str
    """Name of the scale method, or a method per kind of layer, in upper case."""

    @property
    def patches_scales(self) -> bool:
        """Whether one recipe can serve all scales (RUNTIME_SCALE_PATCHING). With patching, the
        compressor asserts that no method uses channel scales (troubleshooting.md of
        vllm-project/vllm-gaudi)."""
        return "PCS" not in self.scale_method

    @property
    def measures(self) -> bool:
        return self.mode == MEASURE

    def measure_file(self, rank: int, num_ranks: int) -> Path:
        """File with the maximum magnitudes of activations and weights that `rank` measured."""
        ranks = f"_{rank}_{num_ranks}" if self.names_ranks else ""
        return Path(f"{self.dump_stats_path}_hooks_{self.observer}{ranks}.npz")

    def check_files(self, num_ranks: int) -> None:
        """Raise ConfigError if measurements that quantization needs are missing for a rank."""
        if self.measures or not self.needs_measures:
            return
        for rank in range(num_ranks):
            file = self.measure_file(rank, num_ranks)
            if not file.is_file():
                raise ConfigError(
                    f"{self.path} has mode QUANTIZE and dump_stats_path {self.dump_stats_path}, "
                    f"and {file} does not exist: measure with {num_ranks} ranks first "
                    "(`gaudiserve calibrate`)"
                )


def read_quant_config(path: str | None) -> QuantConfig:
    """Read the file of --quant-config or QUANT_CONFIG. Raises ConfigError."""
    if path is None:
        raise ConfigError(
            f"--quantization is {INC}, and neither {VARIABLE} nor --quant-config names the "
            "compressor's file: set one of them to the file that `gaudiserve calibrate` writes"
        )
    try:
        fields = parse_json(read_limited(path, MAX_JSON_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}, the file of --quant-config or {VARIABLE}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path}, the file of --quant-config or {VARIABLE}, is not JSON: {json_problem(error)}"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}, the file of --quant-config or {VARIABLE}, is not a JSON object")
    mode = str(fields.get("mode", QUANTIZE)).upper()
    if mode not in MODES:
        raise ConfigError(f"mode in {path} is {fields['mode']!r}, it must be MEASURE or QUANTIZE")
    stats = fields.get("dump_stats_path", "stats")
    if not isinstance(stats, str) or not Path(stats).name:
        raise ConfigError(f"dump_stats_path in {path} is {stats!r}, it must be a path")
    method = fields.get("scale_method", "maxabs_hw")
    is_dynamic = _is_true(fields.get("dynamic_quantization", False))
    is_unmeasured = isinstance(method, str) and method.upper() in UNMEASURED_METHODS
    return QuantConfig(
        path,
        mode,
        stats,
        str(fields.get("observer", "maxabs")),
        needs_measures=not (is_dynamic or is_unmeasured),
        names_ranks=_is_true(fields.get("seperate_measure_files", True)),
        scale_method=str(method).upper(),
    )


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"
