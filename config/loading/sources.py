"""Builds EngineConfig and ServerConfig from flags, variables, a YAML file and defaults, in this
order of precedence. Unknown names and values out of range are errors that name their source."""

import argparse
import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from config.buckets import BucketConfig, Range
from config.data_parallel import DataParallelConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from config.loading import env
from config.loading.flags import FILE_FLAGS, FLAGS, PARTS, Flag
from config.loading.parser import NO_KINDS, FlagParser, KindNames, server_parser
from config.loading.values import (
    Given,
    clipped,
    convert,
    joined,
    nearest,
    shown,
    truth,
    unknown_choice,
    with_sources,
    wrong,
)
from config.loading.vllm_flags import ACCEPTED, absence, is_chat_template
from config.loading.vllm_spelling import (
    MAX_OPTIMIZATION_LEVEL,
    abbreviated,
    ambiguity,
    levels_of,
    with_objects_of_dots,
)
from config.parallel import ParallelConfig
from config.params.lora import LoRAConfig
from config.params.offload import OffloadConfig
from config.params.speculation import SpeculationConfig
from config.server import ServerConfig
from config.whole_files import read_limited

DEFAULT = "default"
MAX_LINEAR_BATCH = 64
"""Largest default of --max-prefill-batch for the linear strategy."""
MAX_FILE_BYTES = 128 * 2**10
"""Maximum size of the --config file."""
MAX_FILE_KEYS = 1000
MAX_FILE_DEPTH = 16
"""Maximum nesting of lists and mappings in the --config file."""
_FLAG_OF = {name: flag for flag in FLAGS for name in flag.names}
_NAMES = (*_FLAG_OF, *FILE_FLAGS, *ACCEPTED)
_FILE_WORDS = frozenset(f"--{name}" for name in _NAMES)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The whole configuration, and the value and source of each setting."""

    engine: EngineConfig
    server: ServerConfig
    sources: Mapping[str, tuple[object, str]]
    without_effect: Mapping[str, str]
    """Accepted vLLM flags with their values -> reason why they have no effect."""
    notes: tuple[str, ...]
    """Notes for the operator: how settings were interpreted, and which have no effect."""
    arguments: argparse.Namespace
    """Parsed command line, including flags specific to the command."""
    words: tuple[str, ...] = ()
    """The command line."""

    def shown(self) -> dict[str, tuple[object, str]]:
        """`sources` with secrets masked."""
        secret = {flag.key for flag in FLAGS if flag.setting.is_secret}
        return {
            key: (_masked(value) if key in secret else value, source)
            for key, (value, source) in self.sources.items()
        }


def _masked(value: object) -> object:
    if isinstance(value, tuple):
        return ("***",) * len(value)
    return "***" if value else value


def load(
    argv: Sequence[str] | None,
    *,
    environ: Mapping[str, str] | None = None,
    default_model: str | None = None,
    parser: FlagParser | None = None,
) -> Loaded:
    """Load the configuration from all sources. Raises ConfigError.

    `environ` None: the variables of this process. `default_model`: model to serve if no source
    names one.
    """
    parser = parser or server_parser("gaudiserve serve", "")
    arguments, problems = parser.parse_known(argv or [])
    flags: list[Given] = arguments.given
    if arguments.model is not None:
        flags = [*flags, Given("model", arguments.model, "argument MODEL")]
    named = {given.value for given in flags if given.name == "model"}
    # The value of an unknown flag may have been parsed as the argument MODEL.
    if len(named) > 1 and not problems:
        problems.append(f"two different models are set, {' and '.join(sorted(map(repr, named)))}")
    loaded = _merge(_variables(environ), flags, problems, arguments, default_model, parser.kinds)
    return replace(loaded, words=tuple(argv or ()))


def from_keywords(**keywords: Any) -> Loaded:
    """Like `load`, from Python keyword arguments: flag names with underscores. Keywords take
    precedence over variables of this process. Raises ConfigError."""
    problems: list[str] = []
    given = [
        Given(name, value, f"keyword {word}")
        for word, value in with_objects_of_dots(keywords)
        if (name := _known(word, value, f"keyword {word}", problems))
    ]
    return _merge(_variables(None), given, problems, argparse.Namespace(), None)


def _variables(environ: Mapping[str, str] | None) -> list[Given]:
    pairs = env.settings(env.environment() if environ is None else environ)
    return [Given(name, word, f"variable {variable}") for name, word, variable in pairs]


def _merge(
    variables: list[Given],
    explicit: list[Given],
    problems: list[str],
    arguments: argparse.Namespace,
    default_model: str | None,
    kinds: KindNames = NO_KINDS,
) -> Loaded:
    """Merge the file, the variables and `explicit` (flags or keyword arguments), in increasing
    precedence. Raises ConfigError; unknown settings and values of a wrong type are reported
    together with `problems`."""
    files = {given.name: str(given.value) for given in (*variables, *explicit)}
    notes = [*getattr(arguments, "notes", ())]
    layers = [_read_file(files["config"], problems, notes) if "config" in files else []]
    layers += [variables, explicit]
    values: dict[str, tuple[object, str]] = {}
    given = [_layer(layer, problems) for layer in layers]
    for layer in given:
        values.update(layer)
    notes += _overridden(*given[-2:])
    _check_kinds(values, kinds, problems)
    for name, strategy in (("bucketing-file", "file"), ("bucketing-traffic", "fitted")):
        if name in values and "bucketing-strategy" not in values:
            values["bucketing-strategy"] = (strategy, values[name][1])
    max_prompts = values.get("prompt-bs-bucket-max", (None, ""))
    if max_prompts[0] is not None:
        # Larger batches have no bucket. vLLM's plug-in uses a single setting for both.
        values.setdefault("max-prefill-batch", max_prompts)
    elif values.get("bucketing-strategy", ("",))[0] == "linear":
        # Default in the Gaudi README of vLLM's fork.
        max_num_seqs, _ = values.get("max-num-seqs", (SchedulerConfig().max_num_seqs, DEFAULT))
        if isinstance(max_num_seqs, int):
            most = (min(max_num_seqs, MAX_LINEAR_BATCH), values["bucketing-strategy"][1])
            values.setdefault("max-prefill-batch", most)
    notes += _within_step(values)
    contiguous = values.get("contiguous-pa", (None, ""))
    if contiguous[0] is True:
        # vLLM's plug-in does the same.
        values.setdefault("enable-prefix-caching", (False, contiguous[1]))
    if "model" not in values:
        # --served-model-name takes several names, so a MODEL after it counts as another name.
        problems += [
            f"{key.name} takes {' and '.join(map(repr, key.value))}, and no model is named: put "
            "MODEL before the flags, or use --model"
            for key in explicit
            if isinstance(key.value, list)
        ]
        if default_model is not None:
            values["model"] = (default_model, DEFAULT)
        elif not problems:
            problems.append(
                "no model is set; set --model to a folder, a .gguf file or a Hugging Face id"
            )
    model = str(values.get("model", ("",))[0])
    without_effect = _without_effect(chain(*layers), model, problems)
    notes += _without_absent_template(values)
    notes += _eager_at_level_0(layers, values, problems)
    if problems:
        raise ConfigError(joined(problems))
    for flag in FLAGS:
        values.setdefault(flag.key, (flag.default, DEFAULT))
    engine, server = _build(values)
    notes += _routes_that_refuse(engine, server)
    sources = {flag.key: values[flag.key] for flag in FLAGS}
    return Loaded(engine, server, sources, without_effect, tuple(notes), arguments)


def _routes_that_refuse(engine: EngineConfig, server: ServerConfig) -> Iterator[str]:
    """Notes about flags of routes that do nothing without other flags."""
    if server.enable_dev_endpoints and not server.serves_dev_endpoints:
        yield "--enable-dev-endpoints has no effect without --api-key"
    if server.allow_runtime_lora_updating:
        missing = [] if engine.lora.enable_lora else ["--enable-lora"]
        missing += [] if server.lora_dir else ["--lora-dir FOLDER"]
        missing += [] if server.has_api_keys else ["--api-key KEY"]
        if missing:
            yield (
                f"--allow-runtime-lora-updating has no effect without {' and '.join(missing)}: "
                "the routes refuse each request"
            )


def _check_kinds(
    values: Mapping[str, tuple[object, str]], kinds: KindNames, problems: list[str]
) -> None:
    """Add a problem for each word of a flag in `kinds` that is neither a choice nor a kind."""
    for key in kinds.keys() & values.keys():
        value, source = values[key]
        choices = _FLAG_OF[key].setting.choices
        for word in value if isinstance(value, tuple) else (value,):
            if word not in choices and word not in (names := kinds[key]()):
                with _collected(problems):
                    raise unknown_choice(Given(key, word, source), (*choices, *names))


def _layer(layer: Iterable[Given], problems: list[str]) -> dict[str, tuple[object, str]]:
    """The settings of a single source. The last value wins, except for list flags of the command
    line, whose values accumulate."""
    values: dict[str, tuple[object, str]] = {}
    for given in layer:
        with _collected(problems):
            if given.name in _FLAG_OF:
                flag = _FLAG_OF[given.name]
                value = convert(flag, given)
                if isinstance(value, tuple) and given.source.startswith("flag"):
                    _extend(values, flag.key, value, given.source)
                else:
                    values[flag.key] = (value, given.source)
    return values


def _overridden(
    variables: Mapping[str, tuple[object, str]], explicit: Mapping[str, tuple[object, str]]
) -> Iterator[str]:
    """Notes about GAUDISERVE_ variables whose settings have other values in `explicit`."""
    for key, (value, source) in explicit.items():
        before, variable = variables.get(key, (value, ""))
        if before != value and variable.startswith(f"variable {env.PREFIX}"):
            yield f"{source} takes precedence over {variable}, which has another value"


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems.append(clipped(str(error)))


def _extend(
    values: dict[str, tuple[object, str]], key: str, more: tuple[str, ...], source: str
) -> None:
    before = values.get(key, ((), ""))[0]
    assert isinstance(before, tuple)
    values[key] = ((*before, *more), source)


def _without_effect(layers: Iterable[Given], model: str, problems: list[str]) -> dict[str, str]:
    """vLLM flags without effect in `layers`, as on a command line -> reason."""
    found = {}
    for given in layers:
        if given.name not in ACCEPTED or given.value is None:
            continue
        accepted = ACCEPTED[given.name]
        with _collected(problems):
            value = str(truth(given)).lower() if accepted.is_switch else given.value
            if not accepted.fits(value, model):
                raise wrong(given, f"{accepted.shown}: {accepted.why}")
            shown = f"--{given.name} {value}"
            if accepted.is_switch:
                shown = f"--{'' if value == 'true' else 'no-'}{given.name}"
            found[shown] = accepted.why
    return found


def _eager_at_level_0(
    layers: Iterable[Iterable[Given]],
    values: dict[str, tuple[object, str]],
    problems: list[str],
) -> Iterator[str]:
    """Set enforce-eager in `values` if vLLM's optimization level is 0, unless it is set or an
    execution mode is chosen; yields a note about it. Levels 1 to 3 compile, which is the
    default."""
    found = [(item, level) for layer in layers for item in layer for level in levels_of(item)]
    for item, level in found:
        if not 0 <= level <= MAX_OPTIMIZATION_LEVEL:
            with _collected(problems):
                raise wrong(item, f"a level from 0 to {MAX_OPTIMIZATION_LEVEL}")
    is_chosen = "enforce-eager" in values or "execution-mode" in values
    if found and found[-1][1] == 0 and not is_chosen:
        source = found[-1][0].source
        values["enforce-eager"] = (True, source)
        yield f"optimization level 0 (from {source}) is treated as --enforce-eager"


def _without_absent_template(values: dict[str, tuple[object, str]]) -> Iterator[str]:
    """Drop a --chat-template that is a file of vLLM's image and does not exist here; yields a note
    about it.

    The model's own template is used instead, and selects the tool-call parser unless
    --tool-call-parser is none.
    """
    template, source = values.get("chat-template", (None, ""))
    if not isinstance(template, str) or not is_chat_template(template) or Path(template).exists():
        return
    values["chat-template"] = (None, source)
    changed = ""
    if values.get("tool-call-parser", ("auto", ""))[0] not in ("auto", "none"):
        values["tool-call-parser"] = ("auto", source)
        changed = " with --tool-call-parser auto"
    yield (
        f"--chat-template {template} is a file of vLLM's image that does not exist here: the "
        f"model's own chat template is used{changed}"
    )


def _within_step(values: dict[str, tuple[object, str]]) -> Iterator[str]:
    """Lower max_num_seqs to max_num_batched_tokens, because each running sequence takes at least
    one token per step, and yield a note. vLLM computes the remaining sequences in the next
    step."""
    budget, source = values.get("max-num-batched-tokens", (None, DEFAULT))
    count, _ = values.get("max-num-seqs", (SchedulerConfig().max_num_seqs, DEFAULT))
    if isinstance(budget, int) and isinstance(count, int) and 0 < budget < count:
        values["max-num-seqs"] = (budget, source)
        yield (
            f"--max-num-batched-tokens is {budget} and --max-num-seqs is {count}: at most "
            f"{budget} sequences run at once; raise --max-num-batched-tokens to {count} to run "
            "them all"
        )


def _read_file(path: str, problems: list[str], notes: list[str]) -> list[Given]:
    try:
        content = _parsed(read_limited(path, MAX_FILE_BYTES).decode("utf-8"))
    # ValueError: for example an invalid date, or an integer with more digits than Python converts.
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else clipped(_yaml_reason(error))
        raise ConfigError(f"the file {path} cannot be read: {reason}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"the file {path} must consist of `key: value` lines")
    if len(content) > MAX_FILE_KEYS:
        raise ConfigError(
            f"the file {path} has {len(content)} keys, at most {MAX_FILE_KEYS} are allowed"
        )
    source = f"file {path}"
    found: dict[str, Given] = {}
    for key, value in _entries(content, source, problems):
        name = _known(_whole(key, source, notes), value, source, problems)
        if not name:
            continue
        if name == "config":
            raise ConfigError(f"{path} names another file ({shown(value)}); only one file is read")
        owner = _FLAG_OF[name].key if name in _FLAG_OF else name
        if owner in found:
            raise ConfigError(f"{source} sets {owner} twice, as {found[owner].name} and as {key}")
        found[owner] = Given(name, value, source)
    return list(found.values())


def _entries(
    content: Mapping[Any, Any], source: str, problems: list[str]
) -> Iterator[tuple[str, object]]:
    """Keys and values of a file; `no-enable-lora: true` becomes `enable-lora: false`."""
    for key, value in with_objects_of_dots(content):
        word = key if isinstance(key, str) else shown(key)
        switch = word.replace("_", "-").removeprefix("no-")
        if not word.startswith("no") or not _is_switch(switch) or word == switch:
            yield word, value
            continue
        with _collected(problems):
            # vLLM turns the key into a flag only if its value is true.
            if truth(Given(word, value, source)):
                yield switch, False


def _whole(key: str, source: str, notes: list[str]) -> str:
    """The full name of the setting that `key` abbreviates; otherwise `key`. Adds a note to `notes`
    about an abbreviation."""
    meant = abbreviated("--" + key.replace("_", "-"), _FILE_WORDS)
    if len(meant) != 1:
        return key
    whole = meant[0][2:]
    notes.append(f"{key} is read as {whole} (from {source}); write the whole name")
    return whole


def _is_switch(name: str) -> bool:
    if name in _FLAG_OF:
        return name in _FLAG_OF[name].all_switches
    return ACCEPTED[name].is_switch if name in ACCEPTED else bool(absence(name))


def _parsed(text: str) -> object:
    """Parse YAML. Raises ValueError, also for aliases, which can expand a small file to a huge
    value, and for values that are nested too deeply; raises the YAML library's errors."""
    depth = 0
    # Parse a stream, because YAML errors for a string quote the line.
    for event in yaml.parse(io.StringIO(text), Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"{_line(event)} has the alias *{event.anchor}, write the value itself"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_FILE_DEPTH:
                raise ValueError(f"{_line(event)} is nested more than {MAX_FILE_DEPTH} levels deep")
        depth -= isinstance(event, yaml.CollectionEndEvent)
    content = yaml.safe_load(io.StringIO(text))
    # An integer with more digits than Python prints, such as 0xfff..., would break errors that
    # quote it.
    repr(content)
    return content


def _yaml_reason(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"it is not YAML at line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def _line(event: yaml.Event) -> str:
    mark = event.start_mark
    assert mark is not None, "the text has lines"
    return f"line {mark.line + 1}"


def _known(word: str, value: object, source: str, problems: list[str]) -> str:
    """Name of the setting for the key `word`; empty if there is no such setting. Adds the error to
    `problems`, unless the value turns off a feature that is not supported."""
    name, word = word.replace("_", "-"), clipped(word)
    if name in _NAMES:
        return name
    if reason := absence(name):
        # enable_lora=False enables nothing, so it needs no support.
        if value is None or value is False:
            return ""
        problems.append(with_sources(f"{word} is not supported: {reason}", (source,)))
    else:
        flag = f"--{name}"
        near = ambiguity(flag, _FILE_WORDS) or nearest(flag, [f"--{known}" for known in _NAMES])
        near = near.replace("--", "")
        if source.startswith("keyword"):
            near = near.replace("-", "_")
        problems.append(with_sources(f"{word} is not a setting{near}", (source,)))
    return ""


def _build(values: Mapping[str, tuple[object, str]]) -> tuple[EngineConfig, ServerConfig]:
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for flag in FLAGS:
        parts[flag.part][flag.field] = values[flag.key][0]
    buckets = parts["buckets"]
    ranges: dict[str, dict[str, Any]] = {}
    for name in [name for name in buckets if "." in name]:
        dimension, _, end = name.partition(".")
        ranges.setdefault(dimension, {})[end] = buckets.pop(name)
    try:
        buckets |= {dimension: Range(**ends) for dimension, ends in ranges.items()}
        engine = EngineConfig(
            **parts["engine"],
            data_parallel=DataParallelConfig(**parts["data_parallel"]),
            cache=CacheConfig(**parts["cache"]),
            parallel=ParallelConfig(**parts["parallel"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
            buckets=BucketConfig(**buckets),
            execution=ExecutionConfig(**parts["execution"]),
            warmup=WarmupConfig(**parts["warmup"]),
            emulator=EmulatorSettings(**parts["emulator"]),
            lora=LoRAConfig(**parts["lora"]),
            offload=OffloadConfig(**parts["offload"]),
            speculation=SpeculationConfig(**parts["speculation"]),
        )
        server = ServerConfig(**parts["server"])
    except ConfigError as error:
        raise ConfigError(clipped(_named(str(error), values))) from None
    return engine, server


def _named(message: str, values: Mapping[str, tuple[object, str]]) -> str:
    """Error message of a dataclass with flag names instead of field names, and the sources."""
    by_field: dict[str, list[Flag]] = {}
    for flag in FLAGS:
        by_field.setdefault(flag.field, []).append(flag)
    sources: list[str] = []

    def rename(match: re.Match[str]) -> str:
        flags = by_field.get(match.group(), [])
        given = [values[flag.key][1] for flag in flags]
        sources.extend(source for source in given if source not in (DEFAULT, *sources))
        return f"--{flags[0].key}" if len(flags) == 1 else match.group()

    # A field name is the first word, or has an underscore; a limit of a range also has a dot.
    # A word in double quotes belongs to an example in JSON.
    renamed = re.sub(r'^[a-z]+\b|(?<!")\b[a-z]+(?:_[a-z]+)+(?:\.[a-z_]+)?\b', rename, message)
    return with_sources(renamed, sources)
