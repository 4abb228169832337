"""PoolingScheduler: which texts a pooling model reads in this step, and what of a request it cannot
do. Knows no executor, no messages and no clock."""

from config.engine import SchedulerConfig
from config.params.pooling import EMBED, TOKEN_EMBED, PoolingFacts, PoolingParams
from engine.core.request import ENDED, RUNNING, WAITING, Request
from engine.scheduling.launch_packer import Chunk, Packer
from engine.scheduling.scheduler import SchedulerOutput
from engine.scheduling.waiting_queue import WaitingQueue
from hpu.protocol import PREFILL, StepPlan, Text


class PoolingScheduler:
    """Gives each step as many texts, whole and by rank, as its budget of tokens holds.

    A text is read in one launch, so a request runs in one step and holds nothing afterwards.
    """

    def __init__(self, config: SchedulerConfig, facts: PoolingFacts, packer: Packer) -> None:
        self.line = WaitingQueue()
        self._facts = facts
        self._packer = packer
        self._max_tokens = config.max_num_batched_tokens
        self._max_texts = config.max_num_seqs
        self._running: set[int] = set()

    @property
    def num_running(self) -> int:
        """Texts in plans that are not collected yet, and still wanted."""
        return len(self._running)

    @property
    def holders(self) -> list[Request]:
        """Nobody holds a block."""
        return []

    @property
    def has_work(self) -> bool:
        return len(self.line) > 0

    def add(self, request: Request) -> None:
        self.line.push(request)

    def drop(self, request: Request) -> None:
        """It is over, wherever it is: finished, failed or aborted."""
        state, request.state = request.state, ENDED
        if state == WAITING:
            self.line.remove(request)
        self._running.discard(request.key)

    def collected(self, step: int) -> None:
        """All plans up to `step` have run: nothing is left of them."""

    def start_afresh(self) -> None:
        """The worker never knows anything of the steps before."""

    def plan(self, step: int) -> SchedulerOutput:
        """Decide this step. Counts on the decision's plan, if it has one, being submitted."""
        decision = SchedulerOutput(step)
        budget = self._max_tokens
        while len(decision.chunks) < self._max_texts:
            request = self.line.first()
            if request is None or request.known > budget:
                break
            why = self._packer.refusal(PREFILL, request.known, 0)
            if why is not None:
                decision.failed.append((request, why, ""))
                self.drop(request)
                continue
            self.line.remove(request)
            request.state = RUNNING
            request.row = len(decision.chunks)
            self._running.add(request.key)
            decision.started.append((request, 0))
            decision.chunks.append(Chunk(request, request.known, 0, False))
            budget -= request.known
        if decision.chunks:
            self._build(decision)
        return decision

    def _build(self, decision: SchedulerOutput) -> None:
        launches = []
        for launch, chunks in self._packer.prefill(decision.chunks):
            launches.append(launch)
            decision.prefills.extend(chunks)
        decision.num_tokens = sum(chunk.num_tokens for chunk in decision.chunks)
        texts = [self._text(chunk.request) for chunk in decision.chunks]
        decision.plan = StepPlan(decision.step, launches, texts=texts)

    def _text(self, request: Request) -> Text:
        asked = request.pooling
        assert asked is not None
        normalizes = self._facts.normalizes if asked.normalize is None else asked.normalize
        return Text(
            request.prompt,
            by_token=asked.task == TOKEN_EMBED,
            normalizes=normalizes,
            dimensions=asked.dimensions or 0,
            num_first=asked.num_first,
            num_skipped=asked.num_skipped,
        )

    def check(self) -> None:
        """Nothing is held that could be lost."""


def pooling_refusal(
    asked: PoolingParams | None, facts: PoolingFacts | None, num_tokens: int
) -> tuple[str, str] | None:
    """Why the model cannot do what a request of `num_tokens` asks, and the setting at fault; None
    when it can."""
    if asked is None or facts is None:
        if asked is None and facts is None:
            return None
        gives = "tokens, and no vectors" if facts is None else "vectors, and no tokens"
        return f"the model gives {gives}", "model"
    if asked.task not in facts.tasks:
        return f"task is {asked.task!r}, the model does {' and '.join(facts.tasks)}", "task"
    for name in ("num_first", "num_skipped"):
        count = getattr(asked, name)
        if count >= num_tokens:
            return f"{name} is {count}, the text has {num_tokens} tokens", name
    return _wrong_dimensions(asked, facts)


def _wrong_dimensions(asked: PoolingParams, facts: PoolingFacts) -> tuple[str, str] | None:
    wanted = asked.dimensions
    if wanted is None or asked.task not in (EMBED, TOKEN_EMBED):
        return None
    width = facts.width if asked.task == EMBED else facts.token_width
    name = "dimensions"
    if wanted > width:
        return f"dimensions is {wanted}, the model's vectors have {width}", name
    if facts.dimensions is None or wanted == width or wanted in facts.dimensions:
        return None
    if facts.dimensions:
        known = ", ".join(map(str, facts.dimensions))
        return f"dimensions is {wanted}, the model was trained for {known}", name
    return (
        f"dimensions is {wanted}, the model's vectors have {width} and were not trained to be cut",
        name,
    )
