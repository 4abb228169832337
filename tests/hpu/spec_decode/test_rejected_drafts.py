"""Drafts that the target rejects leave no wrong blocks in the prefix cache."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from offload_rig import BLOCK_SIZE, TALKS, ask, engine
from tiny_models import VOCAB_SIZE, make_tiny

from config.params.offload import OffloadConfig
from config.params.speculation import SpeculationConfig
from hpu.spec_decode.base import NOTHING, Proposal, Tokens
from hpu.worker import drafting

NUM_DRAFTS = 8
ROOMY = 200
NGRAM = SpeculationConfig(
    speculative_config='{"method": "ngram", "num_speculative_tokens": 8, "adaptive": false}'
)


class HalfWrong:
    """Two drafts that the target accepts, followed by wrong drafts."""

    def __init__(self, truth: list[int]) -> None:
        self._truth = truth
        self.rejected: list[list[int]] = []
        """Each rejected draft, with all tokens before it."""
        self.drafts = True

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        return

    def remove_request(self, req_index: int) -> None:
        return

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        return [self._propose(h.tolist(), n) for h, n in zip(histories, limits, strict=True)]

    def _propose(self, history: list[int], limit: int) -> Proposal:
        next_tokens = self._truth[len(history) :][:limit]
        if not self.drafts or len(next_tokens) < NUM_DRAFTS:
            return NOTHING
        wrong = [3 + (token - 2) % (VOCAB_SIZE - 3) for token in next_tokens[2:]]
        drafts = [*next_tokens[:2], *wrong]
        self.rejected.append([*history, *drafts])
        return Proposal(drafts)

    def measure(self, max_num_seqs: int) -> None:
        return None


def test_blocks_of_rejected_drafts_are_not_found_by_later_prompts(tmp_path: Path) -> None:
    folder, prompt = make_tiny("llama", tmp_path), TALKS[0][:20]
    with engine(folder, OffloadConfig(), num_blocks=ROOMY) as core:
        answer, _ = ask(core, 0, prompt, max_tokens=120)
    proposer = HalfWrong([*prompt, *answer])

    with (
        patch.object(drafting, "select_proposer", lambda *given: proposer),
        engine(folder, OffloadConfig(), num_blocks=ROOMY, speculation=NGRAM) as core,
    ):
        drafted, _ = ask(core, 0, prompt, max_tokens=120)
        counts = dict(core.stats().spec_decode)
        proposer.drafts = False
        # Prompts that continue as the drafts did, where the drafts reached into another block.
        traps = [
            tokens
            for tokens in proposer.rejected
            if len(tokens) // BLOCK_SIZE > (len(tokens) - NUM_DRAFTS + 2) // BLOCK_SIZE
        ]
        found = [ask(core, 1 + index, [*tokens, 5])[1] for index, tokens in enumerate(traps)]
        again, num_cached = ask(core, 99, [*prompt, *answer[:100]])

    assert drafted == answer
    assert counts["num_draft_tokens"] > counts["num_accepted_tokens"] > 20
    assert len(traps) >= 3
    assert found == [(len(tokens) - NUM_DRAFTS + 2) // BLOCK_SIZE * BLOCK_SIZE for tokens in traps]
    # Blocks that held rejected drafts contain the keys and values of the accepted tokens.
    assert again == answer[100:106]
    assert num_cached == 120 // BLOCK_SIZE * BLOCK_SIZE
