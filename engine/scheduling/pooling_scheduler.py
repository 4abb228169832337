"""PoolingScheduler: schedules the requests of a pooling model."""

from collections.abc import Iterable, Set

from config.engine import SchedulerConfig
from config.params.pooling import EMBED, TOKEN_EMBED, PoolingFacts, PoolingParams
from engine.request import FINISHED, RUNNING, WAITING, Request
from engine.scheduling.fair_queue import FairQueue, make_waiting_queue
from engine.scheduling.launch_packer import Chunk, LaunchPacker
from engine.scheduling.lora_slots import LoRASlots
from engine.scheduling.request_turns import RequestTurns
from engine.scheduling.scheduler import SchedulerOutput
from hpu.protocol import PREFILL, StepPlan, Text


class PoolingScheduler:
    """Fills each step with whole texts, up to the token budget; requests of several texts take
    turns.

    A text is computed in one launch, so it runs in one step and needs no blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        facts: PoolingFacts,
        packer: LaunchPacker,
        max_tokens: int,
        lora: LoRASlots | None = None,
    ) -> None:
        self.waiting = make_waiting_queue(config, lora)
        self._fair = self.waiting if isinstance(self.waiting, FairQueue) else None
        self._turns = RequestTurns(by_tenant=config.fair_share)
        self._lora = lora
        self._facts = facts
        self._packer = packer
        self._max_tokens = max_tokens
        self._max_texts = config.max_num_seqs
        self._running: set[int] = set()
        self._suspect: int | None = None
        """Key of the last started crash suspect. While it runs, no other request starts."""

    @property
    def num_running(self) -> int:
        """Requests in plans that are not collected yet."""
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

    def add_request(self, request: Request) -> None:
        if self._lora is not None and request.adapter:
            self._lora.add_request(request)
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
            if self._lora is not None and request.adapter and state != FINISHED:
                if state == RUNNING:
                    self._lora.release(request)
                self._lora.finish_request(request)
            if self._fair is not None and state != FINISHED:
                self._fair.finish(request)

    def restart_requests(self, blocks: Set[int]) -> list[Request]:
        """Always empty: pooling requests have no blocks."""
        return []

    def update_from_output(self, step: int) -> None:
        """Does nothing: there are no blocks to free."""

    def reset(self) -> None:
        """Reset adapter slots; the worker keeps no other state between steps."""
        if self._lora is not None:
            self._lora.reset()

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
                output.failed.append((request, error, ""))
                self.finish_requests([request])
                continue
            self.waiting.remove(request)
            self._turns.start(request)
            if self._lora is not None:
                request.lora_slot = self._lora.start(request)
            if self._fair is not None:
                self._fair.start(request, 0)
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
        if self._lora is not None:
            output.plan.lora_slots, output.plan.lora_adapters = self._lora.take_assigned()

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
        """Raise AssertionError unless the waiting texts and the adapter slots agree; there are no
        blocks to check."""
        assert self._turns.num_waiting == len(self.waiting), (
            f"{self._turns.num_waiting} texts have a turn, {len(self.waiting)} wait"
        )
        if self._lora is not None:
            self._lora.check()


def pooling_refusal(
    params: PoolingParams | None, facts: PoolingFacts | None, num_tokens: int
) -> tuple[str, str] | None:
    """Why the model cannot serve a request of `num_tokens`, and the parameter at fault; None if it
    can."""
    if params is None or facts is None:
        if params is None and facts is None:
            return None
        produces = "tokens, and no vectors" if facts is None else "vectors, and no tokens"
        return f"the model gives {produces}", "model"
    if params.task not in facts.tasks:
        return f"task is {params.task!r}, the model does {' and '.join(facts.tasks)}", "task"
    for name in ("num_first", "num_skipped"):
        count = getattr(params, name)
        if count >= num_tokens:
            return f"{name} is {count}, the text has {num_tokens} tokens", name
    return _wrong_dimensions(params, facts)


def _wrong_dimensions(params: PoolingParams, facts: PoolingFacts) -> tuple[str, str] | None:
    dimensions = params.dimensions
    if dimensions is None or params.task not in (EMBED, TOKEN_EMBED):
        return None
    width = facts.width if params.task == EMBED else facts.token_width
    name = "dimensions"
    if dimensions > width:
        return f"dimensions is {dimensions}, the model's vectors have {width}", name
    if facts.dimensions is None or dimensions == width or dimensions in facts.dimensions:
        return None
    if facts.dimensions:
        trained = ", ".join(map(str, facts.dimensions))
        return f"dimensions is {dimensions}, the model was trained for {trained}", name
    return (
        f"dimensions is {dimensions}, the model's vectors have {width} and were not trained to be "
        "cut",
        name,
    )
