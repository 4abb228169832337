"""LLM: offline inference, with a single engine in this process or several engines in processes."""

import asyncio
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any

from config.checkpoint.resolve import resolve
from config.engine import EXTERNAL_LAUNCHER
from config.errors import UserError
from config.json_text import Json
from config.loading.env import chosen_device, disable_autoload
from config.loading.sources import Loaded
from config.model.model_config import GENERATION_LIMITS
from config.model.read_config import read_model_config
from config.params.beam_search import BeamSearchParams
from config.params.pooling import CLASSIFY, EMBED, PoolingParams
from config.params.sampling import MAX_LOGPROBS, SamplingParams
from config.progress import CountBar, ProgressLines
from config.startup_checks import check_checkpoint, check_device, check_model_config
from engine.client.base import EngineClient
from engine.client.request_limits import RequestTerms
from engine.transport.messages import Ready
from server.generation.beam_search import CandidateBeamSearch
from server.generation.outputs import Prompt
from server.generation.pipeline import Pipeline
from server.multimodal.parts import MediaSource, take_media
from server.offline.engines import make_client, with_fallbacks
from server.offline.event_loop import STOP_TIMEOUT_S, BackgroundLoop, Result, run_in_order
from server.offline.lora import LoRARequest, LoRARequests, adapters_of
from server.offline.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    beam_output,
    request_output,
)
from server.offline.pooling import OfflinePooling, Params, classification_outputs, embedding_outputs
from server.offline.prompt_reader import PromptReader
from server.offline.prompts import (
    PromptInput,
    as_conversation_list,
    as_media_parts,
    as_prompt_list,
    parse_prompt,
)
from server.pooling.inputs import InputOptions, make_input_processor, not_a_pooling_model
from server.pooling.scores import TextPairs
from server.serving.progress import describe
from server.text.messages import Message
from server.text.tokenizer import Tokenizer

CLOSE_RETRY_S = 0.02

LAUNCHING = "launching the engine"
"""Progress before the engine reports its own."""

MakePrompt = Callable[[], Coroutine[Any, Any, Prompt]]


class LLM:
    """Offline inference: `LLM(model="...").generate(["Hello"])`.

    Any flag of `gaudiserve serve` is a keyword argument (`max_model_len=2048`), except flags of its
    HTTP server. Another keyword raises a ConfigError that names the most similar keyword, if any.
    Use LLM in a `with` block, or call `close`: this stops all threads, as does interpreter exit.
    Not thread-safe: make one call at a time.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        self._open(with_fallbacks({"model": model, **flags}))

    @classmethod
    def of(cls, loaded: Loaded) -> "LLM":
        """Create an LLM from settings that have already been read."""
        llm = cls.__new__(cls)
        llm._open(loaded)
        return llm

    def _open(self, loaded: Loaded) -> None:
        with ProgressLines() as lines:
            self._build(loaded, lines)

    def _build(self, loaded: Loaded, lines: ProgressLines) -> None:
        engine, server = loaded.engine, loaded.server
        if chosen_device(engine.device) == "hpu":
            disable_autoload()
        check_device(engine.device)
        check = partial(check_model_config, engine)
        path = resolve(engine, check=check, report=lines.report)
        check_checkpoint(engine, path)
        model_config = read_model_config(path)
        self._prompts = PromptReader(path, server, engine.cache_dir, model_config)
        recommended = model_config.generation_defaults
        self._defaults = _sampling_params(server.sampling_defaults(recommended))
        self._client = client = make_client(dataclasses.replace(engine, model=path), server.log)
        lines.show(lambda: LAUNCHING if client.progress is None else describe(client.progress))
        self._pipeline = Pipeline(self._client, self._prompts.tokenizer, server)
        # Wanted sequences in flight: two batches per engine. Later prompts are not tokenized yet.
        num_engines = engine.data_parallel.data_parallel_size
        self._lookahead = 2 * engine.scheduler.max_num_seqs * num_engines
        self._num_requests = 0
        self._is_lockstep = engine.executor == EXTERNAL_LAUNCHER
        self._start_order: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if self._is_lockstep:
            # Every rank must start the same requests in the same order. The lock is granted in FIFO
            # order.
            self._start_order = asyncio.Lock()
        self._background = BackgroundLoop("llm")
        self._finalizer = weakref.finalize(
            self, _shut_down, self._background, self._client, self._prompts
        )
        try:
            self._ready = self._background.run(_start(self._client))
        except BaseException:
            self.close()
            raise
        self._prompts.max_model_len = self._ready.max_model_len
        processor = make_input_processor(self._ready, self._prompts.tokenizer)
        self._pooling: OfflinePooling | None = None
        if processor is not None:
            self._pooling = OfflinePooling(self._client, processor, max_concurrent=self._lookahead)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; returns the results in the order of the prompts.

        `sampling_params`: parameters for all prompts, or a list with an entry per prompt; None: the
        model's defaults. `lora_request`: adapter for all prompts, or a list with an entry per
        prompt; None: the base model. Raises the errors of its requests, for example PromptTooLong
        for a prompt that does not fit, and EngineDied.
        """
        inputs = [parse_prompt(prompt) for prompt in as_prompt_list(prompts)]
        params = self._params(sampling_params, len(inputs))

        def maker(
            text: str | None,
            ids: list[int] | None,
            images: list[MediaSource],
            param: SamplingParams,
        ) -> MakePrompt:
            return lambda: self._prompts.read(text, ids, images, param)

        jobs = [
            (maker(text, ids, images, param), param, salt)
            for (text, ids, salt, images), param in zip(inputs, params, strict=True)
        ]
        return self._background.run(self._generate(jobs, use_tqdm, lora_request))

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first; at most
        `concurrency_limit` prompts at a time. Raises like `generate`."""
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=min(2 * params.beam_width, MAX_LOGPROBS),
        )
        inputs = [parse_prompt(prompt) for prompt in as_prompt_list(prompts)]
        work = self._beam_search(
            inputs, sampling, params, use_tqdm, concurrency_limit, lora_request
        )
        return self._background.run(work)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Json] | None = None,
        documents: list[Json] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several conversations. Raises like `generate`."""
        conversations = [list(conversation) for conversation in as_conversation_list(messages)]
        params = self._params(sampling_params, len(conversations))
        defaults = self._prompts.template_defaults

        def maker(conversation: list[Message], param: SamplingParams) -> MakePrompt:
            async def make() -> Prompt:
                taken, sources = take_media(as_media_parts(conversation))
                images = await self._prompts.load_images(sources, "messages")
                text = await self._prompts.template.render(
                    taken,
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    kwargs={**defaults, **(chat_template_kwargs or {})},
                    template=chat_template,
                    mark=self._prompts.mark,
                )
                return await self._prompts.read_rendered(text, images, param)

            return make

        jobs = [
            (maker(conversation, param), param, "")
            for conversation, param in zip(conversations, params, strict=True)
        ]
        return self._background.run(self._generate(jobs, use_tqdm, lora_request))

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: Params = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Vectors, class probabilities or logits, or score of each prompt, from a pooling model.

        `pooling_task`: embed, token_embed, classify or score, which replaces the task of
        `pooling_params`; None: the task of a single `pooling_params`. Prompts are truncated to
        `truncate_prompt_tokens` (-1: to the model's maximum). Raises like `generate`.
        """
        if pooling_task is None:
            if not isinstance(pooling_params, PoolingParams):
                raise UserError(
                    "pooling_task is missing, it must be embed, token_embed, classify or score",
                    param="pooling_task",
                )
            pooling_task = pooling_params.task
        pooling = self._require_pooling()

        async def work() -> list[PoolingRequestOutput[PoolingOutput]]:
            (adapter,) = await adapters_of(self._client, lora_request, 1)
            return await pooling.encode(
                prompts,
                pooling_params,
                pooling_task,
                truncate=truncate_prompt_tokens,
                use_tqdm=use_tqdm,
                adapter=adapter,
            )

        return self._background.run(work())

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt. See `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task=EMBED,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )
        return embedding_outputs(outputs)

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: Params = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's classes for each prompt; logits, if the result is not
        normalized. See `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task=CLASSIFY,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
        )
        return classification_outputs(outputs)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: `data_1` has a single text for all of `data_2`, or as many texts as
        `data_2`. See `encode`."""
        pairs = TextPairs(
            [data_1] if isinstance(data_1, str) else list(data_1),
            [data_2] if isinstance(data_2, str) else list(data_2),
            ("data_1", "data_2"),
            InputOptions(pooling_params or PoolingParams(), truncate=truncate_prompt_tokens),
        )
        return self._background.run(self._require_pooling().score(pairs, use_tqdm=use_tqdm))

    def _require_pooling(self) -> OfflinePooling:
        if self._pooling is None:
            raise not_a_pooling_model()
        return self._pooling

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises UserError if skip_tokenizer_init is set."""
        return self._prompts.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters with the defaults from generation_config and
        override_generation_config; other fields have the defaults of SamplingParams."""
        return self._defaults

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on a device; with several devices, on the first device of the last
        pipeline stage."""
        return self._ready.weight_bytes

    def close(self) -> None:
        """Stop the engine and all threads. May be called more than once."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self._defaults
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise UserError(
                f"{count} prompts have {len(params)} sampling_params, the number must be 1 or "
                f"{count}",
                param="sampling_params",
            )
        return list(params)

    async def _generate(
        self,
        jobs: list[tuple[MakePrompt, SamplingParams, str]],
        use_tqdm: bool,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        adapters = await adapters_of(self._client, lora_request, len(jobs))
        first_id = self._num_requests
        self._num_requests += len(jobs)
        num_tokens = 0

        async def run_job(index: int, bar: CountBar) -> RequestOutput:
            nonlocal num_tokens
            make_prompt, params, salt = jobs[index]
            async with self._start_order:
                prompt = await make_prompt()
                terms = RequestTerms(cache_salt=salt, adapter=adapters[index])
                generation = await self._pipeline.start([prompt], params, terms, param="prompt")
            outputs = await generation.collect()
            (prompt_logprobs,) = generation.prompt_logprobs
            num_tokens += generation.num_output_tokens
            rate = num_tokens / max(bar.format_dict["elapsed"], 1e-3)
            bar.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)
            return request_output(
                str(first_id + index),
                prompt,
                outputs,
                prompt_logprobs,
                generation.num_cached_tokens,
            )

        max_n = max((params.n for _, params, _ in jobs), default=1)
        num_workers = max(2, self._lookahead // max_n)
        return await _run_all(run_job, len(jobs), num_workers, use_tqdm)

    async def _beam_search(
        self,
        inputs: list[tuple[str | None, list[int] | None, str, list[MediaSource]]],
        sampling: SamplingParams,
        params: BeamSearchParams,
        use_tqdm: bool,
        concurrency_limit: int | None,
        lora_request: LoRARequests,
    ) -> list[BeamSearchOutput]:
        adapters = await adapters_of(self._client, lora_request, len(inputs))

        async def run_search(index: int, bar: CountBar) -> BeamSearchOutput:
            text, ids, salt, images = inputs[index]
            prompt = await self._prompts.read(text, ids, images, sampling)
            search = await CandidateBeamSearch.start(
                self._pipeline,
                [prompt],
                sampling,
                RequestTerms(cache_salt=salt, adapter=adapters[index]),
                length_penalty=params.length_penalty,
                param="prompt",
            )
            async for _ in search:
                pass
            (beams,) = search.beams
            return beam_output(prompt, beams, self._prompts.tokenizer)

        num_workers = max(1, self._lookahead // sampling.n)
        if concurrency_limit is not None:
            num_workers = max(1, min(num_workers, concurrency_limit))
        if self._is_lockstep:
            # The beams of concurrent searches would start in scheduling order, which may differ
            # between ranks.
            num_workers = 1
        return await _run_all(run_search, len(inputs), num_workers, use_tqdm)


async def _run_all(
    call: Callable[[int, CountBar], Awaitable[Result]],
    count: int,
    num_workers: int,
    use_tqdm: bool,
) -> list[Result]:
    results: dict[int, Result] = {}
    with CountBar(total=count, desc="Prompts", disable=not use_tqdm) as bar:

        async def run(index: int) -> None:
            results[index] = await call(index, bar)
            bar.update()

        await run_in_order(run, range(count), num_workers)
    return [results[index] for index in range(count)]


async def _start(client: EngineClient) -> Ready:
    await client.start()
    return await client.wait_ready()


def _shut_down(background: BackgroundLoop, client: EngineClient, prompts: PromptReader) -> None:
    """Stop everything that an `LLM` started. The finalizer of the LLM calls this function, so it
    must not refer to the LLM."""
    if background.is_current_thread:
        # The garbage collector may run on any thread, and the background thread cannot join itself.
        arguments = (background, client, prompts)
        threading.Thread(target=_shut_down, args=arguments).start()
        return
    try:
        background.run(_close(client))
    finally:
        background.close()
        prompts.close()


async def _close(client: EngineClient) -> None:
    """Close the client, also during interpreter exit: executors then accept no work, and waiting
    for the engine's thread in an executor raises RuntimeError until the thread has ended."""
    for _ in range(int(STOP_TIMEOUT_S / CLOSE_RETRY_S)):
        with contextlib.suppress(RuntimeError):
            return await client.close()
        await asyncio.sleep(CLOSE_RETRY_S)


def _sampling_params(recommended: Mapping[str, float]) -> SamplingParams:
    values: dict[str, Any] = dict(recommended)
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    limits = [int(values.pop(name)) for name in GENERATION_LIMITS if name in values]
    if limits:
        values["max_tokens"] = min(limits)
    return SamplingParams(**values)
