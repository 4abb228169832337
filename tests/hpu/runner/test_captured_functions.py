"""Captured functions beside the model's forward pass, on several ranks."""

from functools import partial

import torch
from captured_card import CapturedCard
from thread_ranks import on_ranks
from torch import Tensor

from hpu.distributed.agreement import Agreement
from hpu.launch_inputs import LaunchArrays
from hpu.layers.metadata import AttentionInputs
from hpu.protocol import DECODE
from hpu.runner.captured_functions import CapturedFunctions
from hpu.runner.counters import Counters
from hpu.runner.graph_cache import CapturingGraphCache
from hpu.runner.input_buffers import DecodeLayout, InputLayout

BUCKET = (DECODE, 2, 1, 4)


def _forward(tokens: Tensor, context: AttentionInputs) -> Tensor:
    return (tokens + context.positions).unsqueeze(-1)


def _captured(card: CapturedCard, agreement: Agreement) -> list[bool]:
    """Whether three functions have a graph, of 3, 4 and 5 tokens."""
    layout: InputLayout[LaunchArrays] = DecodeLayout()
    graphs = CapturingGraphCache(_forward, card, Counters(), budget_bytes=9000, agreement=agreement)
    graphs.capture(layout.buffers(BUCKET, card, is_static=True))
    functions = CapturedFunctions(card, graphs, agreement, "sampling")
    inputs = [torch.zeros(1, size) for size in (3, 4, 5)]
    found = [functions.find(len(x[0]), BUCKET, torch.neg, partial(tuple, [x])) for x in inputs]
    return [graph is not None for graph in found]


def test_all_ranks_stop_capturing_when_the_memory_of_one_rank_is_full() -> None:
    cards = CapturedCard(capacity=2), CapturedCard()

    found = on_ranks(*(partial(_captured, card) for card in cards))

    assert found == [[True, False, False]] * 2


def test_ranks_keep_capturing_after_the_compiler_of_one_rank_refused_a_function() -> None:
    cards = CapturedCard(ungraphable=4), CapturedCard()

    found = on_ranks(*(partial(_captured, card) for card in cards))

    assert found == [[True, False, True]] * 2
