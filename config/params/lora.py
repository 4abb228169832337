"""LoRAConfig: settings for LoRA adapters."""

from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ConfigError
from config.json_text import json_setting_problem, parse_json
from config.setting import check_settings, setting

EMBEDDING, HEAD, EXPERTS = EXTRA_TARGETS = ("embedding", "head", "experts")
"""Optional adapter targets, whose buffers are allocated only if --lora-extra-targets names them or,
with auto, a configured adapter needs them."""
AUTO = "auto"
IMAGE = "image"


class NamedAdapter(NamedTuple):
    """The name and the location of an adapter."""

    name: str
    path: str
    base_model_name: str | None = None
    """Parent of the adapter in /v1/models; None: the served model."""
    kind: str = ""
    """IMAGE: default adapter of image requests that name no adapter."""
    root: str = ""
    """Root folder of the adapter, see AdapterFolder.root."""
    label: str = ""
    """Path or hub id as the user wrote it; empty: `path`."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings for LoRA adapters."""

    enable_lora: bool = setting(False, "Serve LoRA adapters of the model")
    lora_modules: tuple[str, ...] = setting(
        (),
        "Adapters to serve from the start: name=folder, name=file.gguf, name=hub id, or JSON "
        "with name, path and base_model_name",
        metavar="NAME=PATH",
        takes_several=True,
    )
    default_mm_loras: str = setting(
        "",
        'Adapter for requests with images that name no adapter: {"image": '
        '"/models/phi-4/vision-lora"}',
        metavar="JSON",
    )
    max_loras: int = setting(
        1, "Maximum adapters whose requests run at once", minimum=1, maximum=1024
    )
    max_cpu_loras: int | None = setting(
        None,
        "Maximum adapters in host memory; auto: --max-loras, or the configured adapters if more",
        minimum=1,
    )
    max_lora_rank: int = setting(
        16, "Largest rank of an adapter; memory is reserved for it", minimum=1, maximum=4096
    )
    fully_sharded_loras: bool = setting(
        False,
        "Divide both matrices of adapters among tensor-parallel ranks: less memory, "
        "another collective per layer",
    )
    lora_extra_targets: tuple[str, ...] = setting(
        (AUTO,),
        "What adapters may change besides linear layers: embedding, head, experts, or "
        "none; each costs memory and time; auto: as the configured adapters",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for name in self.lora_extra_targets:
            if name not in (AUTO, "none", *EXTRA_TARGETS):
                allowed = ", ".join((AUTO, "none", *EXTRA_TARGETS))
                raise ConfigError(f"lora_extra_targets has {name!r}, it must be one of {allowed}")
        if self.lora_modules and not self.enable_lora:
            count = len(self.lora_modules)
            raise ConfigError(
                f"lora_modules names {count} adapter{'' if count == 1 else 's'}, and enable_lora "
                "is off: add --enable-lora"
            )
        if self.default_mm_loras and not self.enable_lora:
            raise ConfigError(
                f"default_mm_loras is {self.default_mm_loras!r}, and enable_lora is off: add "
                "--enable-lora"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, it must be at least max_loras, which is "
                f"{self.max_loras}"
            )
        names = [adapter.name for adapter in self.adapters]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"lora_modules names {name!r} {names.count(name)} times")

    @property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """The adapters of `lora_modules` and `default_mm_loras`."""
        return (
            *map(_named_adapter, self.lora_modules),
            *_default_adapters(self.default_mm_loras),
        )

    @property
    def num_cpu_loras(self) -> int:
        """`max_cpu_loras` or its default."""
        if self.max_cpu_loras is not None:
            return self.max_cpu_loras
        return max(self.max_loras, len(self.adapters))


_EXAMPLE = '{"name": "sql", "path": "/data/sql-lora"}'


def _named_adapter(word: str) -> NamedAdapter:
    if not word.lstrip().startswith("{"):
        name, _, path = word.partition("=")
        if not name or not path:
            raise ConfigError(
                f"lora_modules has {word!r}, it must be NAME=FOLDER, such as sql=/data/sql-lora"
            )
        return NamedAdapter(name, path)
    try:
        fields = parse_json(word)
    except ValueError as error:
        problem = json_setting_problem(error, _EXAMPLE)
        raise ConfigError(f"lora_modules has {word!r}, {problem}") from None
    known = {"name", "path", "base_model_name"}
    if not (
        {"name", "path"} <= set(fields) <= known
        and all(isinstance(fields[key], str) and fields[key] for key in ("name", "path"))
        and isinstance(fields.get("base_model_name"), str | None)
    ):
        raise ConfigError(
            f"lora_modules has {word!r}, it must have the strings name and path, and may have "
            f"base_model_name: '{_EXAMPLE}'"
        )
    return NamedAdapter(**fields)


def _default_adapters(text: str) -> tuple[NamedAdapter, ...]:
    if not text:
        return ()
    try:
        paths = parse_json(text)
    except ValueError as error:
        problem = json_setting_problem(error, f'{{"{IMAGE}": "/data/image-lora"}}')
        raise ConfigError(f"default_mm_loras is {text!r}, {problem}") from None
    if not isinstance(paths, dict) or set(paths) != {IMAGE} or not isinstance(paths[IMAGE], str):
        raise ConfigError(
            f"default_mm_loras is {text!r}, it must be an object with the single field {IMAGE}, a "
            f'string: {{"{IMAGE}": "folder or hub id"}}'
        )
    return (NamedAdapter(IMAGE, paths[IMAGE], kind=IMAGE),)
