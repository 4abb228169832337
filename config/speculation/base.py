"""SpeculationMethod: the chosen draft method and its limits. MethodFacts: what the other code knows
about a draft method before it drafts."""

from collections.abc import Mapping
from dataclasses import dataclass

from config.errors import ConfigError
from config.kinds import Kinds

MAX_DRAFTS = 64
"""Maximum of num_speculative_tokens."""

Options = Mapping[str, object]
"""Keys and values of --speculative-config, without null; the types are checked."""


class MethodFacts:
    """Facts of a draft method. The mapping METHODS of a file in this folder lists methods by their
    names in --speculative-config. This base class: a method without keys of its own, which needs no
    checkpoint."""

    keys: Mapping[str, type] = {}
    """Keys of --speculative-config that the method accepts besides the common keys, and the types
    of their values."""
    spellings: tuple[str, ...] = ()
    """Older names of the method."""
    has_drafter = False
    """Whether a draft model or a draft head proposes tokens; then these facts are DrafterFacts."""
    reads_embedding = False
    """Whether the drafter uses the target's embedding."""

    def is_inferred(self, model: str) -> bool:
        """Whether the draft model's name `model`, in lower case, suggests this method. Of several
        suggested methods, settings without a method get the last method in the order of the
        files."""
        return False

    def default_drafts(self, options: Options) -> int | None:
        """Value of num_speculative_tokens if `options` do not contain it; None: it is required.
        Raises ConfigError for values out of range."""
        return None

    def settings(self, options: Options) -> object:
        """SpeculationMethod.settings for the method's own keys. Raises ConfigError for values out
        of range."""
        return None

    def reads_earlier_outputs(self, settings: object) -> bool:
        """Whether drafts depend on the outputs of requests that have ended. Only the last pipeline
        stage knows these outputs."""
        return False


DRAFT_METHODS = Kinds[MethodFacts]("config.speculation", "METHODS", "draft method")


@dataclass(frozen=True, slots=True)
class SpeculationMethod:
    """Draft method and its limits."""

    method: str
    max_drafts: int
    """Maximum draft tokens per request and step."""
    settings: object = None
    """Result of MethodFacts.settings; None: the method has no settings of its own."""
    adaptive: bool = True
    """Whether to draft fewer tokens when drafts cost more time than they save."""
    model: str = ""
    """Draft checkpoint, in the same forms as --model; empty: the method has no checkpoint of its
    own."""
    revision: str | None = None
    """Revision of a hub id."""
    max_model_len: int | None = None
    """Maximum context of the drafter in tokens; it drafts nothing for longer contexts. None: the
    limit of the drafter's checkpoint."""
    draft_tensor_parallel_size: int | None = None
    """Number of devices that the drafter is divided among; None: as many as the target."""

    @property
    def facts(self) -> MethodFacts:
        return DRAFT_METHODS[self.method]

    @property
    def has_drafter(self) -> bool:
        return self.facts.has_drafter

    @property
    def reads_earlier_outputs(self) -> bool:
        return self.facts.reads_earlier_outputs(self.settings)


def number(options: Options, name: str, *, most: int | None = None) -> int | None:
    """The integer `name` of `options`; None if it is absent. Raises ConfigError for a value below 1
    or above `most`."""
    if name not in options:
        return None
    value = options[name]
    assert isinstance(value, int)
    if value < 1 or (most is not None and value > most):
        allowed = "at least 1" if most is None else f"between 1 and {most}"
        raise ConfigError(f"{name} is {value}, it must be {allowed}")
    return value
