"""AppState: what handlers are given, and whether they may start. Knows no HTTP."""

import hashlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from config.engine import EngineConfig
from config.errors import EngineDied, NotFound, Overloaded, UserError
from config.server import ServerConfig
from engine.client.zmq import EngineClient
from engine.transport.messages import AWAKE
from server.generation.answer_parser import NO_FORMS, Forms
from server.generation.pipeline import Pipeline, asleep
from server.generation.tracking import Serving
from server.http.body import BodyReader
from server.metrics.registry import Metrics
from server.pooling.inputs import InputReader, generates_only, reader_of
from server.process.peer_proxy import Siblings
from server.process.progress_bar import in_words
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

STARTING_RETRY_S = 5
DRAINING_RETRY_S = 30
NAME_CHARACTERS_SHOWN = 200
MAX_RECENT = 100


@dataclass(slots=True)
class AppState:
    """One front-end. The text parts are None until they are loaded; see `open`."""

    config: ServerConfig
    client: EngineClient
    metrics: Metrics
    version: str
    model_names: tuple[str, ...]
    """At least one; the first is the default."""
    root: str
    """What the operator asked to serve."""
    engine_config: EngineConfig | None = None
    """What the engine was told, where it was told here."""
    has_priorities: bool = False
    """Whether the engine runs under the priority policy."""
    created: int = field(default_factory=lambda: int(time.time()))
    pipeline: Pipeline | None = None
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    inputs: InputReader | None = None
    """Reads the inputs of a pooling model; None: the model generates."""
    forms: Forms = NO_FORMS
    """How answers are read."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    max_model_len: int = 0
    is_draining: bool = False
    stage: str = "starting"
    """What start-up is busy with before the engine says something itself."""
    servings: set[Serving] = field(default_factory=set)
    """Bounded by the client's limits on the line and the batch."""
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """Figures of the requests that this front-end answered last (see server.record.Record.told)."""
    siblings: Siblings = field(default_factory=Siblings)
    num_open_requests: int = 0
    """Requests of any kind whose answer has not ended, streams included."""
    bodies: BodyReader = field(init=False)
    """Reads request bodies within this server's limit."""
    fingerprint: str = field(init=False)
    """Constant for one model and version."""

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.config.max_body_bytes)
        digest = hashlib.sha256(f"{self.version}:{self.root}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:10]}"

    def open(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        sampling_defaults: Mapping[str, float],
    ) -> None:
        """Take requests from now on; the engine is ready."""
        ready = self.client.ready
        assert ready is not None
        self.tokenizer, self.template = tokenizer, template
        if self.config.generation_config == "auto":
            self.sampling_defaults = sampling_defaults
        self.forms = Forms.of(self.config, "" if template is None else template.source)
        self.max_model_len = ready.max_model_len
        self.inputs = reader_of(ready, tokenizer)
        if self.inputs is not None:
            self.max_model_len = self.inputs.max_tokens
        self.metrics.add_sizes(ready.max_model_len)
        self.pipeline = Pipeline(self.client, tokenizer, self.config)

    @property
    def is_ready(self) -> bool:
        return (
            self.pipeline is not None
            and self.client.failure is None
            and not self.is_draining
            and self.client.stats.sleep == AWAKE
        )

    @property
    def status(self) -> str:
        """One word or two on where this front-end stands."""
        if self.client.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if self.client.stats.sleep != AWAKE:
            return "sleeping"
        return "ready" if self.pipeline is not None else "starting"

    def opened(self) -> Pipeline:
        """The pipeline of a model that generates. Raises what `check_awake` does, and UserError."""
        pipeline = self.check_awake()
        pipeline.check_generates()
        return pipeline

    def pooling(self) -> InputReader:
        """What reads the inputs of a pooling model. Raises what `check_awake` does, and UserError
        for a model that generates."""
        self.check_awake()
        if self.inputs is None:
            raise generates_only()
        return self.inputs

    def check_open(self) -> Pipeline:
        """Raise EngineDied or Overloaded while no request may come."""
        if self.client.failure is not None:
            raise EngineDied(self.client.failure)
        if self.is_draining:
            raise Overloaded(
                "The server is shutting down.", retry_after_s=DRAINING_RETRY_S, type="server_error"
            )
        if self.pipeline is None:
            raise Overloaded(
                f"The server is starting ({self.progress}), it takes no requests yet.",
                retry_after_s=STARTING_RETRY_S,
                type="server_error",
            )
        return self.pipeline

    def check_awake(self) -> Pipeline:
        """As `check_open`, for what the model itself has to do: Overloaded while it sleeps too."""
        pipeline = self.check_open()
        if self.client.stats.sleep != AWAKE:
            raise asleep()
        return pipeline

    @property
    def progress(self) -> str:
        """Where start-up stands, in words."""
        progress = self.client.progress
        if progress is None:
            return self.stage
        return in_words(progress)

    def model(self, name: str | None) -> str:
        """The name to answer with. Raises NotFound."""
        if name is None:
            return self.model_names[0]
        if not name:
            raise UserError("model is empty, it must be a served name or absent", param="model")
        if name not in self.model_names:
            raise NotFound(
                f"The model `{name[:NAME_CHARACTERS_SHOWN]}` does not exist.",
                param="model",
                code="model_not_found",
            )
        return name

    def text_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer. Raises UserError on a server that was started without one."""
        if self.tokenizer is None:
            raise UserError(
                "this server has no tokenizer, send token ids to /v1/completions", param=param
            )
        return self.tokenizer

    def chat_template(self) -> ChatTemplate:
        """The template. Raises UserError on a server that was started without one."""
        if self.template is None:
            raise UserError("this server has no tokenizer and no chat template", param="messages")
        return self.template
