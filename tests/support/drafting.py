"""Engines with drafts, and requests for them: chunks, prefix hits, and a KV cache far too small."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.params.sampling import SamplingParams
from engine.transport.messages import EngineStats
from gaudiserve import LLM, RequestOutput
from hpu.spec_decode.base import DraftingCosts, Proposal, Proposer, Tokens

SHAPE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 144,
    "block_size": 8,
    "num_gpu_blocks_override": 26,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "skip_tokenizer_init": True,
}
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 400}
SHARED_PREFIX = [5 + 7 * i % 301 for i in range(41)]
PROMPTS = [
    [9],
    [*SHARED_PREFIX, 11, 12],
    [17 + i for i in range(23)],
    [*SHARED_PREFIX, 13],
    SHARED_PREFIX[:32],
    [*SHARED_PREFIX, *range(40, 65)],
    [3 * i % 290 + 8 for i in range(8)],
    [*SHARED_PREFIX[:24], 99, 98],
]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.3, seed=5, max_tokens=64, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.5, top_k=20, seed=6, max_tokens=48),
    SamplingParams(temperature=0, frequency_penalty=0.2, repetition_penalty=1.1, max_tokens=60),
    SamplingParams(temperature=0.5, seed=1, logit_bias={7: 2.0, 8: 2.5}, max_tokens=40),
    SamplingParams(temperature=0, min_tokens=9, stop_token_ids=(*range(0, 320, 5),)),
    SamplingParams(temperature=0.4, seed=3, n=3, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.2, seed=2, max_tokens=40, logprobs=3, ignore_eos=True),
]


class Recorder:
    """A proposer that records its drafts."""

    def __init__(self, inner: Proposer, kept: list[tuple[list[int], list[int]]]) -> None:
        self._inner = inner
        self._kept = kept
        self.add_request, self.remove_request = inner.add_request, inner.remove_request

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        found = self._inner.propose(req_indices, histories, limits)
        for history, proposal in zip(histories, found, strict=True):
            self._kept.append((history.tolist(), proposal.tokens))
        return found

    def measure(self, max_num_seqs: int) -> DraftingCosts | None:
        return self._inner.measure(max_num_seqs)


def run(
    folder: Path, params: SamplingParams | list[SamplingParams] = GREEDY, **flags: Any
) -> tuple[list[RequestOutput], EngineStats]:
    with LLM(str(folder), **{**SHAPE, **flags}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return outputs, llm._client.stats


def choices(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, choice.stop_reason)
        for output in outputs
        for choice in output.outputs
    ]
