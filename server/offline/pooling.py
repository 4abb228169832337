"""Vectors, classes and scores for callers of LLM. Knows no HTTP."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from tqdm import tqdm

from config.errors import UserError
from config.params.pooling import TOKEN_EMBED, PoolingParams
from engine.client.base import EngineClient
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
from server.offline.prompts import PromptInput, listed, prompt_of
from server.pooling.inputs import InputOptions, InputProcessor
from server.pooling.pipeline import PoolingInput, PoolingStream, Vectors
from server.pooling.scores import TextPairs, pair_inputs, pair_scores

Params = PoolingParams | Sequence[PoolingParams] | None


class OfflinePooling:
    """For one model and engine."""

    def __init__(
        self, client: EngineClient, reader: InputProcessor, *, max_concurrent: int
    ) -> None:
        self._client = client
        self._reader = reader
        self._max_concurrent = max_concurrent
        self._ids = itertools.count()

    async def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        given: Params,
        task: str,
        *,
        truncate: int | None,
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt. Raises UserError."""
        wanted = [prompt_of(prompt) for prompt in listed(prompts)]
        inputs = await self._inputs(wanted, _params(given, task, len(wanted)), truncate)
        salts = {salt for _, _, salt in wanted}
        if len(salts) > 1:
            raise UserError(
                f"the prompts have {len(salts)} cache salts, one call takes 1", param="cache_salt"
            )
        pooling = self._start(inputs, "".join(salts))
        vectors = await _watched(pooling, use_tqdm)
        return [
            PoolingRequestOutput(
                str(next(self._ids)),
                PoolingOutput(made if one.params.task == TOKEN_EMBED else made[0]),
                one.token_ids,
                cached,
            )
            for one, made, cached in zip(inputs, vectors, pooling.cached_tokens, strict=True)
        ]

    async def score(self, pairs: TextPairs, *, use_tqdm: bool) -> list[ScoringRequestOutput]:
        """How well the texts of each pair go together. Raises UserError."""
        inputs = await pair_inputs(self._reader, pairs)
        pooling = self._start(inputs, "")
        vectors = await _watched(pooling, use_tqdm)
        scores = pair_scores(self._reader.facts, vectors, len(pairs.firsts))
        num_firsts = len(inputs) - len(pairs.seconds)
        made = []
        for place, score in enumerate(scores):
            parts = [num_firsts + place]
            if num_firsts:
                # Read apart, once each; one may be compared with all of the others.
                parts.insert(0, place if num_firsts > 1 else 0)
            made.append(
                ScoringRequestOutput(
                    str(next(self._ids)),
                    ScoringOutput(score),
                    [token for part in parts for token in inputs[part].token_ids],
                    sum(pooling.cached_tokens[part] for part in parts),
                )
            )
        return made

    def _start(self, inputs: list[PoolingInput], salt: str) -> PoolingStream:
        return PoolingStream(
            self._client, inputs, cache_salt=salt, max_concurrent=self._max_concurrent
        )

    async def _inputs(
        self,
        wanted: list[tuple[str | None, list[int] | None, str]],
        params: list[PoolingParams],
        truncate: int | None,
    ) -> list[PoolingInput]:
        if not wanted:
            return []
        for one in set(params):
            self._reader.check(one)
        asked = InputOptions(params[0], param="prompts", truncate=truncate)
        texts = [text for text, ids, _ in wanted if ids is None and text is not None]
        lists = [ids for _, ids, _ in wanted if ids is not None]
        if len(texts) == len(wanted):
            read = await self._reader.texts(texts, asked)
        elif len(lists) == len(wanted):
            read = await self._reader.token_lists(lists, asked)
        else:
            read = []
            for place, (text, ids, _) in enumerate(wanted):
                alone = replace(asked, param=f"prompts[{place}]", is_list=False)
                if ids is not None:
                    read += await self._reader.token_lists([ids], alone)
                elif text is not None:
                    read += await self._reader.texts([text], alone)
        if len(set(params)) == 1:
            return read
        return [
            PoolingInput(
                one.token_ids,
                msgspec.structs.replace(own, num_skipped=one.params.num_skipped),
            )
            for one, own in zip(read, params, strict=True)
        ]


def embeddings(
    outputs: list[PoolingRequestOutput[PoolingOutput]],
) -> list[EmbeddingRequestOutput]:
    """Outputs of the task embed, as lists of numbers."""
    return [
        EmbeddingRequestOutput(
            one.request_id,
            EmbeddingOutput(one.outputs.data.tolist()),
            one.prompt_token_ids,
            one.num_cached_tokens,
        )
        for one in outputs
    ]


def classes(
    outputs: list[PoolingRequestOutput[PoolingOutput]],
) -> list[ClassificationRequestOutput]:
    """Outputs of the task classify, as lists of numbers."""
    return [
        ClassificationRequestOutput(
            one.request_id,
            ClassificationOutput(one.outputs.data.tolist()),
            one.prompt_token_ids,
            one.num_cached_tokens,
        )
        for one in outputs
    ]


async def _watched(pooling: PoolingStream, use_tqdm: bool) -> list[Vectors]:
    with tqdm(total=pooling.num_inputs, desc="Inputs", disable=not use_tqdm) as bar:
        async for done in pooling:
            bar.update(len(done))
    return pooling.vectors


def _params(given: Params, task: str, count: int) -> list[PoolingParams]:
    """Those of each prompt, for this task."""
    if given is None:
        given = PoolingParams(task=task)
    if isinstance(given, PoolingParams):
        return [msgspec.structs.replace(given, task=task)] * count
    if len(given) != count:
        raise UserError(
            f"{count} prompts came with {len(given)} pooling_params, give one or as many",
            param="pooling_params",
        )
    return [msgspec.structs.replace(one, task=task) for one in given]
