"""AppState: state shared by all request handlers, including whether requests are accepted."""

import hashlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from config.engine import EngineConfig
from config.errors import EngineDied, NotFound, Overloaded, UserError
from config.json_text import Json
from config.progress import STARTING
from config.server import ServerConfig
from engine.client.base import EngineClient
from engine.transport.messages import AWAKE
from server.generation.answer_parser import NO_PARSERS, ParserConfig
from server.generation.pipeline import Pipeline, asleep
from server.generation.validation import OutputLimits
from server.http.auth import ApiKeys
from server.http.body import BodyReader
from server.http.pacing import LoopPacer
from server.http.peer_proxy import Peers
from server.http.unread_answers import UnreadAnswers
from server.metrics.registry import Metrics
from server.multimodal.inputs import ImageLoader
from server.serving.progress import describe
from server.serving.tracking import RequestTracker
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    # The module needs an optional dependency.
    from server.metrics.traces import Tracer

STARTING_RETRY_S = 5
DRAINING_RETRY_S = 30
NAME_CHARACTERS_SHOWN = 200
NAMES_SHOWN = 3
MAX_RECENT = 100
MAX_RESTARTS = 5
"""Maximum number of engine restarts that the page shows."""


class PastRestart(NamedTuple):
    """A finished restart of an engine."""

    engine: int
    ended: float
    """Unix time at which the engine was ready again."""
    seconds: float
    reason: str


@dataclass(slots=True)
class AppState:
    """State of an API server. `open` sets the fields that depend on the model, such as the
    tokenizer, the template and the pipeline."""

    config: ServerConfig
    client: EngineClient
    metrics: Metrics
    version: str
    model_names: tuple[str, ...]
    """Served model names, at least one; the first is the default."""
    root: str
    """The `root` of the base model in /v1/models."""
    engine_config: EngineConfig | None = None
    """The engine's configuration; None if this process does not know it."""
    has_priorities: bool = False
    """Whether the engine uses priority scheduling."""
    has_fair_share: bool = False
    """Whether the engine is shared fairly among API keys."""
    max_ttft_s: float = 0.0
    """Limit on the expected time to first token of a new request; 0: unlimited."""
    created: int = field(default_factory=lambda: int(time.time()))
    pipeline: Pipeline | None = None
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    images: ImageLoader | None = None
    """Loader of images and videos; None if the server accepts neither."""
    parser_config: ParserConfig = NO_PARSERS
    """The tool-call and reasoning parsers."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    max_model_len: int = 0
    is_draining: bool = False
    stage: str = STARTING
    """Start-up stage that is shown until the engine reports its own progress."""
    active_requests: set[RequestTracker[Any]] = field(default_factory=set)
    """Requests in the engine; bounded by the engine client's limits on the queue and the batch."""
    recent_requests: deque[Json] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """Statistics of the latest requests to the engine (see RequestRecord.summary)."""
    engine_restarts: deque[PastRestart] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS))
    peers: Peers = field(default_factory=Peers)
    tracer: "Tracer | None" = None
    """Exports a trace of each finished request; None without --otlp-traces-endpoint."""
    num_open_requests: int = 0
    """Number of HTTP requests whose response has not ended, including streams."""
    bodies: BodyReader = field(init=False)
    """Reader of request bodies within this server's limits."""
    unread_answers: UnreadAnswers = field(default_factory=UnreadAnswers)
    """Long responses and stream output that clients have not read."""
    pooling_pacer: LoopPacer = field(default_factory=lambda: LoopPacer(1))
    """Spreads the inputs that pooling requests send over iterations of the event loop."""
    api_keys: ApiKeys = field(init=False)
    template_defaults: Mapping[str, Any] = field(init=False)
    """Default variables of the chat template, which a request may override."""
    fingerprint: str = field(init=False)
    """The system_fingerprint; constant for a model and version."""

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.config.max_body_bytes)
        self.api_keys = ApiKeys(self.config.api_keys, self.config.api_key_file)
        self.template_defaults = self.config.template_defaults
        digest = hashlib.sha256(f"{self.version}:{self.root}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:10]}"

    def open(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        sampling_defaults: Mapping[str, float],
        images: ImageLoader | None = None,
    ) -> None:
        """Start accepting requests. The engine must be ready."""
        ready = self.client.ready
        assert ready is not None
        self.tokenizer, self.template, self.images = tokenizer, template, images
        if images is not None:
            images.preprocessor.on_lookup = self.metrics.image_looked_up
            images.preprocessor.on_processed = self.metrics.image_processed
        self.sampling_defaults = self.config.sampling_defaults(sampling_defaults)
        self.parser_config = ParserConfig.of(
            self.config,
            "" if template is None else template.source,
            generic_tools=template is not None and template.uses_generic_tools(),
        )
        self.max_model_len = ready.max_model_len
        self.metrics.add_sizes(ready.max_model_len)
        limits = OutputLimits.of(self.sampling_defaults)
        self.pipeline = Pipeline(self.client, tokenizer, self.config, limits)

    @property
    def media_kinds(self) -> tuple[bytes, ...]:
        """Kinds of media besides text; empty without an image loader."""
        return () if self.images is None else tuple(self.images.marks)

    @property
    def pools(self) -> bool:
        """Whether the engine runs a pooling model."""
        ready = self.client.ready
        return ready is not None and ready.pooling is not None

    @property
    def status(self) -> str:
        """State for probes: ready, starting, restarting, sleeping, draining or failed."""
        if self.client.has_failed:
            return "failed"
        if self.is_draining:
            return "draining"
        if self.client.is_restarting:
            return "restarting"
        if self.client.stats.sleep != AWAKE:
            return "sleeping"
        return "ready" if self.pipeline is not None else "starting"

    def generation_pipeline(self) -> Pipeline:
        """Pipeline of a generative model. Raises the errors of `check_awake`, and UserError for a
        pooling model."""
        pipeline = self.check_awake()
        pipeline.check_generates()
        return pipeline

    def check_open(self) -> Pipeline:
        """The pipeline. Raises EngineDied or Overloaded while requests are not accepted."""
        if self.client.has_failed:
            raise EngineDied(self.client.failure)
        if self.is_draining:
            raise Overloaded(
                "The server is shutting down.", retry_after_s=DRAINING_RETRY_S, type="server_error"
            )
        if self.pipeline is None:
            raise Overloaded(
                f"The server is starting ({self.progress}), it accepts no requests yet.",
                retry_after_s=STARTING_RETRY_S,
                type="server_error",
            )
        return self.pipeline

    def check_awake(self) -> Pipeline:
        """Like `check_open`, but also raises Overloaded while the model sleeps."""
        pipeline = self.check_open()
        if self.client.stats.sleep != AWAKE:
            raise asleep()
        return pipeline

    @property
    def progress(self) -> str:
        """Start-up progress as text."""
        progress = self.client.progress
        if progress is None:
            return self.stage
        return describe(progress)

    def model(self, name: str | None) -> str:
        """Model name for the response: `name`, or the default. Raises NotFound."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names and name not in self.client.adapters:
            served = [*self.model_names, *self.client.adapters]
            first = served[:NAMES_SHOWN]
            known = ", ".join(f"`{known[:NAME_CHARACTERS_SHOWN]}`" for known in first)
            more = f" and {len(served) - NAMES_SHOWN} more" if len(served) > NAMES_SHOWN else ""
            raise NotFound(
                f"The model `{name[:NAME_CHARACTERS_SHOWN]}` does not exist; this server has "
                f"{known}{more}.",
                param="model",
                code="model_not_found",
            )
        return name

    def adapter_of(self, name: str) -> str:
        """LoRAInfo.content of the model `name`; empty for the base model. Raises NotFound if the
        adapter has been unloaded since `model()` checked the name."""
        if name in self.model_names:
            return ""
        info = self.client.adapters.get(name)
        if info is None:
            raise NotFound(
                f"The adapter `{name[:NAME_CHARACTERS_SHOWN]}` was unloaded.",
                param="model",
                code="model_not_found",
            )
        return info.content

    def text_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer. Raises UserError if the server has no tokenizer."""
        if self.tokenizer is None:
            raise UserError(
                "this server has no tokenizer: send token ids to a route that accepts them",
                param=param,
            )
        return self.tokenizer

    def chat_template(self) -> ChatTemplate:
        """The chat template. Raises UserError with --skip-tokenizer-init."""
        if self.template is None:
            raise UserError("this server has no tokenizer and no chat template", param="messages")
        return self.template
