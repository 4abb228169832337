"""PagedHarness: a decoder in hand-made prefill and decode launches, with scattered blocks and any
padding. A slow, simple replacement of the batch state, buckets and runner."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from config.model.read_config import read_model_config
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.metadata import DecodeAttentionInputs, FeatureInputs, PrefillAttentionInputs
from hpu.model_loader.loader import load_weights
from hpu.models.base import CausalLM, LoadableModel
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model, build_transformers_model
from hpu.quantization.kv_cache import KVCacheFormat
from hpu.quantization.registry import process_weights


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    group: ProcessGroup = SINGLE,
    format: KVCacheFormat | None = None,
) -> Decoder:
    """The decoder of a checkpoint folder, on CPU. `format`: format of its KV cache."""
    model = build_model(
        read_model_config(str(folder)),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        group=group,
    )
    if format is not None:
        model.use_kv_cache_format(format)
    load_weights(model, str(folder), on_progress=lambda done, total: None, group=group)
    process_weights(model, None)
    return model


def load_transformers_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    group: ProcessGroup = SINGLE,
) -> LoadableModel:
    """The model of a checkpoint folder, in transformers' own code."""
    model = build_transformers_model(
        read_model_config(str(folder)),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        group=group,
    )
    load_weights(model, str(folder), on_progress=lambda done, total: None, group=group)
    return model


class PagedHarness:
    """Sequences over one pool of blocks; every launch returns the logits of its real tokens."""

    def __init__(
        self,
        model: CausalLM,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        num_states: int = 16,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`num_states`: rows of a model with states; row i has state i. `cache_dtype`: None selects
        the model's dtype."""
        self.model = model
        self.block_size = block_size
        self.pad_block = num_blocks
        # Slots that were never written hold values that would ruin any sum. Blocks are not
        # allocated in memory order.
        dtype = cache_dtype or model.dtype
        # One-byte formats also get large numbers and large scales.
        unwritten = 1e4 if dtype.is_floating_point else 96
        self.caches = [
            tuple(torch.full(shape, unwritten, dtype=dtype) for shape in shapes)
            for shapes in model.cache_shapes(num_blocks + 1, block_size)
        ]
        model.bind_caches(self.caches, block_size)
        self.pad_state = num_states
        self.states = [
            tuple(
                torch.full((num_states + 1, *shape), torch.nan, dtype=dtype)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            for spec in model.state_specs()
        ]
        if self.states:
            model.bind_states(self.states)
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self._free: Iterator[int] = iter(shuffled.tolist())
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def _grow(self, row: int, length: int) -> None:
        table = self._tables.setdefault(row, [])
        while len(table) * self.block_size < length:
            table.append(next(self._free))

    def slot(self, row: int, position: int) -> int:
        """Slot of the row's token at `position`."""
        block = self._tables[row][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def preempt(self, row: int) -> None:
        """Drop the row's blocks; its next prefill starts again."""
        del self._tables[row], self._lengths[row]

    def _state_indices(self, rows: Iterable[int], batch: int) -> Tensor | None:
        if not self.states:
            return None
        indices = torch.full((batch,), self.pad_state)
        for index, row in enumerate(rows):
            indices[index] = row
        return indices

    def prefill(
        self,
        new: dict[int, list[int]],
        *,
        pad_rows: int = 0,
        pad_query: int = 0,
        pad_blocks: int = 0,
    ) -> dict[int, Tensor]:
        """Run each row's new tokens; logits (tokens, vocab) by row."""
        batch = len(new) + pad_rows
        query = max(len(tokens) for tokens in new.values()) + pad_query
        held = {row: self._lengths.get(row, 0) for row in new}
        blocks = max(-(-length // self.block_size) for length in held.values()) + pad_blocks
        pad_slot = self.pad_block * self.block_size
        tokens = torch.zeros(batch, query, dtype=torch.long)
        positions = torch.zeros(batch, query, dtype=torch.long)
        slots = torch.full((batch, query), pad_slot)
        query_lens, context_lens = torch.zeros(batch).long(), torch.zeros(batch).long()
        block_list = torch.full((batch, blocks), self.pad_block)
        for index, (row, ids) in enumerate(new.items()):
            start, end = held[row], held[row] + len(ids)
            self._grow(row, end)
            tokens[index, : len(ids)] = torch.tensor(ids)
            positions[index, : len(ids)] = torch.arange(start, end)
            for place in range(start, end):
                slots[index, place - start] = self.slot(row, place)
            used = -(-start // self.block_size)
            block_list[index, :used] = torch.tensor(self._tables[row][:used]).long()
            query_lens[index], context_lens[index] = len(ids), start
            self._lengths[row] = end
        hidden = self.model(
            tokens,
            PrefillAttentionInputs(
                positions,
                slots.view(-1),
                query_lens,
                context_lens,
                block_list.view(-1),
                FeatureInputs(self._state_indices(new, batch)),
            ),
        )
        return {
            row: self.model.logits(hidden[index, : len(ids)])
            for index, (row, ids) in enumerate(new.items())
        }

    def decode(
        self, last: dict[int, int], *, pad_rows: int = 0, pad_blocks: int = 0
    ) -> dict[int, Tensor]:
        """Run one token a row; logits (vocab) by row."""
        batch = len(last) + pad_rows
        tokens, positions = torch.zeros(batch, 1).long(), torch.zeros(batch, 1).long()
        slots = torch.full((batch,), self.pad_block * self.block_size)
        blocks: list[tuple[int, int, int, int]] = []
        for index, (row, token) in enumerate(last.items()):
            position = self._lengths[row]
            self._grow(row, position + 1)
            tokens[index, 0], positions[index, 0] = token, position
            slots[index] = self.slot(row, position)
            for place, block in enumerate(self._tables[row]):
                start = place * self.block_size
                usage = min(self.block_size, position + 1 - start)
                blocks.append((block, index, start, usage))
            self._lengths[row] = position + 1
        blocks += [(self.pad_block, -1, 0, 1)] * pad_blocks
        block_list, groups, starts, usage_column = torch.tensor(blocks).t().contiguous()
        hidden = self.model(
            tokens,
            DecodeAttentionInputs(
                positions,
                slots,
                block_list,
                groups,
                starts,
                usage_column,
                FeatureInputs(self._state_indices(last, batch)),
            ),
        )
        logits = self.model.logits(hidden[:, 0])
        return {row: logits[index] for index, row in enumerate(last)}
