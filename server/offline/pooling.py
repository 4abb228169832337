"""Offline pooling: vectors, classes and scores for callers of LLM."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from config.errors import UserError
from config.params.pooling import TOKEN_EMBED, PoolingParams
from config.progress import CountBar
from engine.client.base import EngineClient
from engine.client.request_limits import RequestTerms
from server.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from server.offline.prompts import PromptInput, as_prompt_list, parse_prompt
from server.pooling.inputs import InputOptions, InputProcessor
from server.pooling.pipeline import PoolingInput, PoolingStream, Vectors
from server.pooling.scores import TextPairs, pair_inputs, pair_scores

Params = PoolingParams | Sequence[PoolingParams] | None


class OfflinePooling:
    """Runs pooling requests of an LLM."""

    def __init__(
        self, client: EngineClient, processor: InputProcessor, *, max_concurrent: int
    ) -> None:
        self._client = client
        self._processor = processor
        self._max_concurrent = max_concurrent
        self._ids = itertools.count()

    async def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: Params,
        task: str,
        *,
        truncate: int | None,
        use_tqdm: bool,
        adapter: str = "",
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Run a pooling task; returns the result of each prompt. Raises UserError, Overloaded, and
        the errors of PoolingStream."""
        parsed = [parse_prompt(prompt) for prompt in as_prompt_list(prompts)]
        if num_images := sum(len(images) for *_, images in parsed):
            raise UserError(
                f"the prompts have {num_images} images, only text can be embedded",
                param="prompt",
            )
        inputs = await self._inputs(
            [(text, ids) for text, ids, *_ in parsed],
            _task_params(params, task, len(parsed)),
            truncate,
        )
        salts = {salt for _, _, salt, _ in parsed}
        if len(salts) > 1:
            raise UserError(
                f"the prompts have {len(salts)} cache salts, a call may have at most 1",
                param="cache_salt",
            )
        pooling = self._start(inputs, "".join(salts), adapter)
        vectors = await _collect(pooling, use_tqdm)
        return [
            PoolingRequestOutput(
                str(next(self._ids)),
                PoolingOutput(rows if item.params.task == TOKEN_EMBED else rows[0]),
                item.token_ids,
                cached,
            )
            for item, rows, cached in zip(inputs, vectors, pooling.cached_tokens, strict=True)
        ]

    async def score(self, pairs: TextPairs, *, use_tqdm: bool) -> list[ScoringRequestOutput]:
        """Score text pairs; returns an output per pair. Raises UserError, Overloaded, and the
        errors of PoolingStream."""
        inputs = await pair_inputs(self._processor, pairs)
        pooling = self._start(inputs, "")
        vectors = await _collect(pooling, use_tqdm)
        scores = pair_scores(self._processor.facts, vectors, len(pairs.firsts))
        num_firsts = len(inputs) - len(pairs.seconds)
        outputs = []
        for index, score in enumerate(scores):
            parts = [num_firsts + index]
            if num_firsts:
                # Each text was a separate input; a single first text belongs to all pairs.
                parts.insert(0, index if num_firsts > 1 else 0)
            outputs.append(
                ScoringRequestOutput(
                    str(next(self._ids)),
                    ScoringOutput(score),
                    [token for part in parts for token in inputs[part].token_ids],
                    sum(pooling.cached_tokens[part] for part in parts),
                )
            )
        return outputs

    def _start(self, inputs: list[PoolingInput], salt: str, adapter: str = "") -> PoolingStream:
        return PoolingStream(
            self._client,
            inputs,
            RequestTerms(cache_salt=salt, adapter=adapter),
            max_concurrent=self._max_concurrent,
        )

    async def _inputs(
        self,
        prompts: list[tuple[str | None, list[int] | None]],
        params: list[PoolingParams],
        truncate: int | None,
    ) -> list[PoolingInput]:
        if not prompts:
            return []
        for distinct in set(params):
            self._processor.check(distinct)
        options = InputOptions(params[0], param="prompts", truncate=truncate)
        texts = [text for text, ids in prompts if ids is None and text is not None]
        lists = [ids for _, ids in prompts if ids is not None]
        if len(texts) == len(prompts):
            inputs = await self._processor.texts(texts, options)
        elif len(lists) == len(prompts):
            inputs = await self._processor.token_lists(lists, options)
        else:
            inputs = []
            for index, (text, ids) in enumerate(prompts):
                single = replace(options, param=f"prompts[{index}]", is_list=False)
                if ids is not None:
                    inputs += await self._processor.token_lists([ids], single)
                elif text is not None:
                    inputs += await self._processor.texts([text], single)
        if len(set(params)) == 1:
            return inputs
        return [
            PoolingInput(
                item.token_ids,
                msgspec.structs.replace(param, num_skipped=item.params.num_skipped),
            )
            for item, param in zip(inputs, params, strict=True)
        ]


def embedding_outputs(
    outputs: list[PoolingRequestOutput[PoolingOutput]],
) -> list[EmbeddingRequestOutput]:
    """Convert outputs of the task embed."""
    return [
        EmbeddingRequestOutput(
            output.request_id,
            EmbeddingOutput(output.outputs.data.tolist()),
            output.prompt_token_ids,
            output.num_cached_tokens,
        )
        for output in outputs
    ]


def classification_outputs(
    outputs: list[PoolingRequestOutput[PoolingOutput]],
) -> list[ClassificationRequestOutput]:
    """Convert outputs of the task classify."""
    return [
        ClassificationRequestOutput(
            output.request_id,
            ClassificationOutput(output.outputs.data.tolist()),
            output.prompt_token_ids,
            output.num_cached_tokens,
        )
        for output in outputs
    ]


async def _collect(pooling: PoolingStream, use_tqdm: bool) -> list[Vectors]:
    with CountBar(total=pooling.num_sequences, desc="Inputs", disable=not use_tqdm) as bar:
        async for done in pooling:
            bar.update(len(done))
    return pooling.vectors


def _task_params(params: Params, task: str, count: int) -> list[PoolingParams]:
    if params is None:
        params = PoolingParams(task=task)
    if isinstance(params, PoolingParams):
        return [msgspec.structs.replace(params, task=task)] * count
    if len(params) != count:
        raise UserError(
            f"{count} prompts have {len(params)} pooling_params, the number must be 1 or {count}",
            param="pooling_params",
        )
    return [msgspec.structs.replace(param, task=task) for param in params]
