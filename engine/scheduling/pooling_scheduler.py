"""PoolingScheduler: schedules the requests of a pooling model."""

from collections.abc import Iterable, Sequence, Set

from config.engine import SchedulerConfig
from config.params.pooling import EMBED, TOKEN_EMBED, PoolingFacts, PoolingParams
from engine.request import FINISHED, RUNNING, WAITING, Request
from engine.scheduling.launch_packer import Chunk, LaunchPacker
from engine.scheduling.request_turns import RequestTurns
from engine.scheduling.resource import Refusal, RequestResource
from engine.scheduling.scheduler import SchedulerOutput
from engine.scheduling.waiting_queue import WaitingQueue
from engine.transport.messages import AddRequest
from hpu.protocol import PREFILL, TOKEN_BYTES, StepPlan, Text


class PoolingScheduler:
    """Fills each step with whole texts, up to the token budget and max_num_seqs; requests with
    several texts alternate (see RequestTurns).

    A text is computed in a single launch, so it runs in one step and needs no KV blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        facts: PoolingFacts,
        packer: LaunchPacker,
        max_tokens: int,
        resources: Sequence[RequestResource] = (),
    ) -> None:
        """`max_tokens`: token budget of a step."""
        self.waiting = waiting
        self._resources = resources
        self._turns = RequestTurns(by_tenant=config.fair_share)
        self._facts = facts
        self._packer = packer
        self._max_tokens = max_tokens
        self._max_texts = config.max_num_seqs
        self._running: set[int] = set()
        self._suspect: int | None = None
        """Key of the crash suspect that started last. While it runs, no other request starts."""

    @property
    def num_running(self) -> int:
        """Unfinished requests in plans whose results are not collected yet."""
        return len(self._running)

    @property
    def num_prefilling_tokens(self) -> int:
        """Always 0: a text is computed in one launch."""
        return 0

    @property
    def requests_with_blocks(self) -> list[Request]:
        """Always empty: pooling requests have no blocks."""
        return []

    @property
    def has_work(self) -> bool:
        return len(self.waiting) > 0

    def refusal(self, message: AddRequest) -> Refusal | None:
        """Why the model cannot serve a request; None if it can."""
        if message.pooling is None:
            return Refusal("the model is a pooling model and generates no tokens", "model")
        num_tokens = message.prompt.nbytes // TOKEN_BYTES
        return _pooling_refusal(message.pooling, self._facts, num_tokens)

    def add_request(self, request: Request) -> None:
        for resource in self._resources:
            resource.add_request(request)
        self._turns.add(request)
        self.waiting.add(request)

    def finish_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests that finished, failed or were aborted, in any state."""
        for request in requests:
            state, request.state = request.state, FINISHED
            if state == WAITING:
                self.waiting.remove(request)
                self._turns.remove(request)
            self._running.discard(request.key)
            if state == FINISHED:
                continue
            for resource in self._resources:
                if state == RUNNING:
                    resource.release(request)
                resource.finish_request(request)
            self.waiting.finish(request)

    def restart_requests(self, blocks: Set[int]) -> list[Request]:
        """Always empty: pooling requests have no blocks."""
        return []

    def enqueue(self, request: Request) -> None:
        """Never called: pooling requests have no grammar."""

    def hold_back(self, requests: Iterable[Request]) -> list[Request]:
        """Always empty: pooling requests have no grammar."""
        return []

    def update_from_output(self, step: int) -> None:
        """Does nothing: there are no blocks to free."""

    def reset(self) -> None:
        """Reset the resources; the worker keeps no other state between steps."""
        for resource in self._resources:
            resource.reset()

    def schedule(self, step: int) -> SchedulerOutput:
        """Schedule a step. The caller must submit the output's plan unless it is None."""
        output = SchedulerOutput(step)
        budget = self._max_tokens
        while len(output.chunks) < self._max_texts:
            request = self.waiting.peek()
            if request is None or request.num_tokens > budget:
                break
            # Crash isolation: a suspect runs alone.
            if self._suspect in self._running or (request.is_suspect and self._running):
                break
            error = self._packer.refusal(PREFILL, request.num_tokens, 0)
            if error is not None:
                output.failed.append((request, error))
                self.finish_requests([request])
                continue
            self.waiting.remove(request)
            self._turns.start(request)
            for resource in self._resources:
                resource.start(request)
            self.waiting.start(request, 0)
            request.state = RUNNING
            request.req_index = len(output.chunks)
            self._running.add(request.key)
            if request.is_suspect:
                self._suspect = request.key
            output.started.append((request, 0))
            output.chunks.append(Chunk(request, request.num_tokens, 0, False))
            budget -= request.num_tokens
        if output.chunks:
            self._build(output)
        return output

    def _build(self, output: SchedulerOutput) -> None:
        launches = []
        for launch, chunks in self._packer.prefill(output.chunks):
            launches.append(launch)
            output.prefills.extend(chunks)
        output.num_tokens = sum(chunk.num_tokens for chunk in output.chunks)
        texts = [self._text(chunk.request) for chunk in output.chunks]
        output.plan = StepPlan(output.step, launches, texts=texts)
        for resource in self._resources:
            resource.fill_plan(output.plan)

    def _text(self, request: Request) -> Text:
        params = request.pooling
        assert params is not None
        normalizes = self._facts.normalizes if params.normalize is None else params.normalize
        return Text(
            request.prompt,
            by_token=params.task == TOKEN_EMBED,
            normalizes=normalizes,
            dimensions=params.dimensions or 0,
            num_first=params.num_first,
            num_skipped=params.num_skipped,
            lora_slot=request.lora_slot,
        )

    def check(self) -> None:
        """Raise AssertionError unless the waiting texts and the resources agree; pooling requests
        have no blocks."""
        assert self._turns.num_waiting == len(self.waiting), (
            f"{self._turns.num_waiting} texts have a turn, {len(self.waiting)} wait"
        )
        for resource in self._resources:
            resource.check(self._running)


def _pooling_refusal(params: PoolingParams, facts: PoolingFacts, num_tokens: int) -> Refusal | None:
    """Why the model cannot serve a request whose text has `num_tokens` tokens; None if it can."""
    if params.task not in facts.tasks:
        error = f"task is {params.task!r}, the model supports {' and '.join(facts.tasks)}"
        return Refusal(error, "task")
    for name in ("num_first", "num_skipped"):
        count = getattr(params, name)
        if count >= num_tokens:
            return Refusal(
                f"{name} is {count}, it must be below the {num_tokens} tokens of the text", name
            )
    wrong = _wrong_dimensions(params, facts)
    return None if wrong is None else Refusal(wrong, "dimensions")


def _wrong_dimensions(params: PoolingParams, facts: PoolingFacts) -> str | None:
    dimensions = params.dimensions
    if dimensions is None or params.task not in (EMBED, TOKEN_EMBED):
        return None
    width = facts.width if params.task == EMBED else facts.token_width
    if dimensions > width:
        return (
            f"dimensions is {dimensions}, it must be at most {width}, the length of the model's "
            "vectors"
        )
    if facts.dimensions is None or dimensions == width or dimensions in facts.dimensions:
        return None
    if facts.dimensions:
        trained = ", ".join(map(str, facts.dimensions))
        return (
            f"dimensions is {dimensions}, it must be one of {trained}, for which the model was "
            "trained"
        )
    return (
        f"dimensions is {dimensions}, it must be {width}: the model was not trained for shorter "
        "vectors"
    )
