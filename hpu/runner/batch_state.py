"""BatchState: persistent host state of the live requests; fills the inputs of a bucket."""

import copy

import numpy as np

from hpu.launch_inputs import (
    DecodeArrays,
    DraftArrays,
    Integers,
    LaunchArrays,
    PrefillArrays,
    Tokens,
)
from hpu.protocol import Launch, NewRequest


class BatchState:
    """State of up to `max_num_reqs` requests of at most `max_model_len` tokens, over the KV blocks
    0 .. `pad_block` - 1. `req_index` is a request's index into every array.

    The keys and values of a request's first `num_computed_tokens` of `num_tokens` tokens are in its
    blocks. `fill_prefill` and `fill_decode` advance these counts before the device has finished, so
    that the next plan can follow: a sampled token is counted immediately, although only the device
    knows its value.

    Raises RuntimeError if a plan is inconsistent with the state (an engine bug).
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        pad_block: int,
        *,
        contiguous: bool = False,
    ) -> None:
        """`contiguous`: a decode reads the cache as a single slice, so entry i of its block inputs
        describes block i; requests of a decode must not share a block."""
        self.max_num_reqs = max_num_reqs
        self.block_size = block_size
        self.pad_block = pad_block
        self.contiguous = contiguous
        max_blocks = -(-max_model_len // block_size)
        self._block_tables = np.zeros((max_num_reqs, max_blocks), np.int32)
        self._num_blocks = np.zeros(max_num_reqs, np.int64)
        self._num_computed_tokens = np.zeros(max_num_reqs, np.int64)
        self._num_tokens = np.zeros(max_num_reqs, np.int64)
        self._num_prompt_tokens = np.zeros(max_num_reqs, np.int64)
        self._tokens = np.zeros((max_num_reqs, max_model_len), np.uint32)
        self._is_live = np.zeros(max_num_reqs, np.bool_)
        self.num_logprobs = np.full(max_num_reqs, -1, np.int64)
        """(max_num_reqs,): see RequestSampling.num_logprobs; -1: none requested."""
        self.num_prompt_logprobs = np.full(max_num_reqs, -1, np.int64)
        self._pad_slots = pad_block * block_size + np.arange(block_size)

    def follower(self) -> "BatchState":
        """View of this state with its own `num_computed_tokens`, for a drafter. Requests, tokens
        and blocks are shared; change them only through the original state."""
        other = copy.copy(self)
        other._num_computed_tokens = np.zeros_like(self._num_computed_tokens)
        return other

    def remove_request(self, req_index: int) -> None:
        """Free a request's index."""
        if not 0 <= req_index < self.max_num_reqs or not self._is_live[req_index]:
            raise RuntimeError(
                f"request {req_index} of {self.max_num_reqs} is removed, but it is not live"
            )
        self._is_live[req_index] = False
        self._num_blocks[req_index] = 0
        self.num_logprobs[req_index] = -1
        self.num_prompt_logprobs[req_index] = -1

    def add_request(self, new: NewRequest) -> Tokens:
        """Add a request at a free index. Returns its tokens (uint32) as a view of the state."""
        req_index = new.req_index
        tokens = np.frombuffer(new.tokens, np.dtype("<u4"))
        if not 0 <= req_index < self.max_num_reqs or self._is_live[req_index]:
            raise RuntimeError(
                f"request index {req_index} of {self.max_num_reqs} is not free for a new request"
            )
        if not new.num_computed_tokens < len(tokens) <= self._tokens.shape[1]:
            raise RuntimeError(
                f"request {req_index} has {len(tokens)} tokens, {new.num_computed_tokens} of them "
                f"computed: at least 1 must not be computed, and at most {self._tokens.shape[1]} "
                "tokens are allowed"
            )
        self._is_live[req_index] = True
        self._tokens[req_index, : len(tokens)] = tokens
        self._num_tokens[req_index] = len(tokens)
        self._num_prompt_tokens[req_index] = new.num_prompt_tokens
        self._num_computed_tokens[req_index] = new.num_computed_tokens
        self._num_blocks[req_index] = 0
        self.append_blocks(req_index, new.blocks)
        if new.num_computed_tokens > len(new.blocks) * self.block_size:
            raise RuntimeError(
                f"request {req_index}: {new.num_computed_tokens} computed tokens do not fit "
                f"{len(new.blocks)} blocks"
            )
        self.num_logprobs[req_index] = new.sampling.num_logprobs
        self.num_prompt_logprobs[req_index] = new.sampling.num_prompt_logprobs
        return self._tokens[req_index, : len(tokens)]

    def append_blocks(self, req_index: int, blocks: list[int]) -> None:
        """Append blocks to a request's block table."""
        start = int(self._num_blocks[req_index])
        end = start + len(blocks)
        if not self._is_live[req_index] or end > self._block_tables.shape[1]:
            raise RuntimeError(
                f"request {req_index} is not live or has {end} blocks, at most "
                f"{self._block_tables.shape[1]} are allowed"
            )
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.pad_block:
            raise RuntimeError(
                f"request {req_index} has the blocks {blocks}, they must be from 0 to "
                f"{self.pad_block - 1}"
            )
        self._block_tables[req_index, start:end] = blocks
        self._num_blocks[req_index] = end

    def move_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Replace block sources[i] by targets[i] in every block table."""
        if not all(0 <= block < self.pad_block for block in (*sources, *targets)):
            raise RuntimeError(
                f"blocks {sources} are moved to {targets}, they must be from 0 to "
                f"{self.pad_block - 1}"
            )
        new = np.arange(self.pad_block + 1, dtype=np.int32)
        new[sources] = targets
        live = np.flatnonzero(self._is_live)
        self._block_tables[live] = new[self._block_tables[live]]

    def fill_prefill(self, launch: Launch, out: PrefillArrays) -> list[int]:
        """Write a prefill's inputs and advance its requests. Returns the indices of the sampling
        requests."""
        indices = self._check_live(launch)
        counts: Integers = np.asarray(launch.query_lens, np.int64)
        (rows, query), batch = out.tokens.shape, len(out.query_lens)
        # Sequences that are concatenated in one row share its length and its context blocks.
        is_merged = batch > rows
        join = np.sum if is_merged else np.max
        blocks = out.block_list.shape[1]
        n = len(indices)
        if not (len(counts) == len(launch.samples) == n) or n > batch or join(counts) > query:
            raise RuntimeError(
                f"{n} requests of {launch.query_lens} tokens do not fit {launch.bucket}"
            )
        computed = self._num_computed_tokens[indices]
        if counts.min() < 1 or (computed + counts > self._num_tokens[indices]).any():
            raise RuntimeError(
                f"counts {launch.query_lens} of requests {launch.req_indices} must be at least 1 "
                "and must not exceed their remaining tokens"
            )
        context_blocks = -(-computed // self.block_size)
        if join(context_blocks) > blocks:
            raise RuntimeError(f"{join(context_blocks)} context blocks do not fit {launch.bucket}")
        self._check_blocks(indices, computed + counts)
        out.query_lens[:n] = counts
        out.query_lens[n:] = 0
        out.context_lens[:n] = computed
        out.context_lens[n:] = 0
        out.block_list[:] = self.pad_block
        out.state_indices[:n] = indices
        out.state_indices[n:] = self.max_num_reqs
        if is_merged:
            self._fill_row(indices, counts, computed, context_blocks, out)
            return self._advance(launch, indices, counts, np.cumsum(counts) - 1, out)

        positions = computed[:, None] + np.arange(query)
        if n == batch and counts.min() == query:
            # No padding: always true for a single prompt with exact buckets.
            out.tokens[:] = self._tokens[indices[:, None], positions]
            out.positions[:] = positions
            out.slot_mapping[:] = self._slot_mapping(indices[:, None], positions)
        else:
            self._fill_padded(indices, counts, positions, out)
        # Pad a prompt's context with its own first block, not with the pad block. The pad block may
        # contain NaN, written by the padding of a prompt with a non-finite token, and attention
        # with weight 0 would yield 0 * NaN.
        out.block_list[:n] = self._block_tables[indices, :1]
        width = min(blocks, self._block_tables.shape[1])
        is_context = np.arange(width) < context_blocks[:, None]
        out.block_list[:n, :width][is_context] = self._block_tables[indices, :width][is_context]
        return self._advance(launch, indices, counts, np.arange(n) * query + counts - 1, out)

    def _fill_row(
        self,
        indices: Integers,
        counts: Integers,
        computed: Integers,
        context_blocks: Integers,
        out: PrefillArrays,
    ) -> None:
        """Write the tokens and context blocks of several requests, concatenated in one row."""
        tokens, column = _ragged_indices(counts)
        positions, requests, total = computed[tokens] + column, indices[tokens], len(tokens)
        out.tokens[0, :total] = self._tokens[requests, positions]
        out.tokens[0, total:] = 0
        out.positions[0, :total] = positions
        out.positions[0, total:] = 0
        out.slot_mapping[0, :total] = self._slot_mapping(requests, positions)
        out.slot_mapping[0, total:] = np.resize(self._pad_slots, out.tokens.shape[1] - total)
        blocks, column = _ragged_indices(context_blocks)
        out.block_list[0, : len(blocks)] = self._block_tables[indices[blocks], column]

    def _fill_padded(
        self, indices: Integers, counts: Integers, positions: Integers, out: PrefillArrays
    ) -> None:
        n, (batch, query) = len(indices), out.tokens.shape
        is_real = np.arange(query) < counts[:, None]
        positions = np.where(is_real, positions, 0)
        pads = np.resize(self._pad_slots, (batch, query))
        out.tokens[:n] = np.where(is_real, self._tokens[indices[:, None], positions], 0)
        out.tokens[n:] = 0
        out.positions[:n] = positions
        out.positions[n:] = 0
        out.slot_mapping[:n] = np.where(
            is_real, self._slot_mapping(indices[:, None], positions), pads[:n]
        )
        out.slot_mapping[n:] = pads[n:]

    def fill_decode(self, launch: Launch, out: DecodeArrays) -> None:
        """Write a decode's inputs and advance its requests. All requests sample."""
        indices = self._check_live(launch)
        n = len(indices)
        positions = self._num_computed_tokens[indices]
        if (positions != self._num_tokens[indices] - 1).any():
            raise RuntimeError(
                f"requests {launch.req_indices}: a decode needs exactly one uncomputed token"
            )
        self._check_blocks(indices, positions + 1)
        self._fill_blocks(launch, indices, positions, out)

        out.req_indices[:n] = indices
        out.positions[:n, 0] = positions
        out.slot_mapping[:n] = self._slot_mapping(indices, positions)
        if n < len(out.req_indices):
            out.req_indices[n:] = self.max_num_reqs
            out.positions[n:] = 0
            out.slot_mapping[n:] = np.resize(self._pad_slots, len(out.slot_mapping) - n)
        self._num_computed_tokens[indices] += 1
        self._num_tokens[indices] += 1

    def fill_rows(self, launch: Launch, counts: list[int], out: DecodeArrays) -> None:
        """Write the inputs of a decode with `counts[i]` rows for request i: its last token, then
        its drafts. Does not advance the requests."""
        indices = self._check_live(launch)
        requests, offsets = _ragged_indices(np.asarray(counts))
        rows = indices[requests]
        positions = self._num_computed_tokens[rows] + offsets
        self._check_blocks(rows, positions + 1)
        self._fill_blocks(launch, rows, positions, out)
        out.req_indices[:] = rows
        out.positions[:, 0] = positions
        out.slot_mapping[:] = self._slot_mapping(rows, positions)

    def fill_drafts(
        self,
        launch: Launch,
        num_pending: Integers,
        lookback: int,
        out: DraftArrays,
    ) -> None:
        """Write the inputs of a decode whose rows are computed on the device. Does not advance the
        requests.

        Args:
            num_pending: (requests,) decodes in flight per request, whose accepted tokens are not
                on the host yet.
            lookback: number of positions before the last token that a drafter recomputes.
        """
        indices = self._check_live(launch)
        n, batch, total = len(indices), len(out.req_indices), len(out.block_list)
        counts = self._num_blocks[indices]
        groups, columns = _ragged_indices(counts)
        num_blocks = len(groups)
        if n > batch or num_blocks > total:
            raise RuntimeError(f"{n} requests over {num_blocks} blocks do not fit {launch.bucket}")
        lows = self._num_computed_tokens[indices] + num_pending
        self._check_blocks(indices, lows + 1)
        self.fill_no_drafts(out)
        out.req_indices[:n] = indices
        out.limits[:n] = np.minimum(counts * self.block_size, self._tokens.shape[1])
        out.may_draft[:n] = 1
        out.lows[:n] = lows
        first = out.first_blocks[:n] = np.maximum(lows - lookback, 0) // self.block_size
        window = first[:, None] + np.arange(out.windows.shape[1])
        table = self._block_tables[indices[:, None], np.minimum(window, counts[:, None] - 1)]
        out.windows[:n] = table
        out.block_list[:num_blocks] = self._block_tables[indices[groups], columns]
        out.block_groups[:num_blocks] = groups
        out.block_starts[:num_blocks] = columns * self.block_size

    def last_tokens(self, req_indices: list[int], count: int) -> tuple[Integers, Tokens]:
        """Number of tokens of each request (n,), and its last tokens (n, count), right-aligned;
        columns before the first token are arbitrary."""
        num_tokens: Integers = self._num_tokens[req_indices]
        columns = np.maximum(num_tokens[:, None] - count + np.arange(count), 0)
        tokens: Tokens = self._tokens[np.asarray(req_indices)[:, None], columns]
        return num_tokens, tokens

    def fill_no_drafts(self, out: DraftArrays) -> None:
        """Fill all arrays except `features` with padding."""
        out.req_indices[:] = self.max_num_reqs
        out.limits[:] = out.lows[:] = out.first_blocks[:] = out.block_starts[:] = 0
        out.may_draft[:] = out.block_groups[:] = -1
        out.windows[:] = out.block_list[:] = self.pad_block
        out.pad_slots[:] = np.resize(self._pad_slots, len(out.pad_slots))

    def advance_decode(self, req_index: int, count: int) -> None:
        """Advance a request by the `count` tokens that a decode of `fill_drafts` accepted,
        including the token sampled after the last accepted draft."""
        self._num_computed_tokens[req_index] += count
        self._num_tokens[req_index] += count

    def num_row_blocks(self, req_indices: list[int], counts: list[int]) -> int:
        """Total number of KV blocks that the rows of `fill_rows` read."""
        indices = np.asarray(req_indices, np.int64)
        requests, offsets = _ragged_indices(np.asarray(counts))
        positions = self._num_computed_tokens[indices[requests]] + offsets
        return int((positions // self.block_size + 1).sum())

    def draft_capacity(self, req_index: int) -> int:
        """Number of draft tokens that fit into the request's blocks and context, with room for the
        input token of the next decode; may be negative."""
        room = min(int(self._num_blocks[req_index]) * self.block_size, self._tokens.shape[1])
        return room - int(self._num_computed_tokens[req_index]) - 2

    def tokens(self, req_index: int) -> Tokens:
        """Tokens of a request (uint32), as a view. The value of a sampled token is arbitrary until
        it is set: `set_last_token`, `append_tokens`, `set_sampled`."""
        return self._tokens[req_index, : self._num_tokens[req_index]]

    def set_last_token(self, req_index: int, token: int) -> None:
        """Set the value of the newest token, which `num_tokens` already includes."""
        last = int(self._num_tokens[req_index]) - 1
        if last < self._tokens.shape[1]:
            self._tokens[req_index, last] = max(token, 0)

    def append_tokens(self, req_index: int, tokens: list[int]) -> None:
        """Append the tokens of a decode of `fill_rows`: the accepted drafts and the token sampled
        after them."""
        start = int(self._num_tokens[req_index])
        room = max(self._tokens.shape[1] - start, 0)
        self._tokens[req_index, start : start + len(tokens)] = np.maximum(tokens[:room], 0)
        self._num_computed_tokens[req_index] += len(tokens)
        self._num_tokens[req_index] += len(tokens)

    def set_sampled(self, req_index: int, num_tokens: int, last_tokens: Tokens) -> None:
        """Set a request's token count and newest tokens; all tokens but the last count as computed.

        `last_tokens`: right-aligned; columns before the first token are ignored.
        """
        last_tokens = last_tokens[-num_tokens:]
        self._tokens[req_index, num_tokens - len(last_tokens) : num_tokens] = last_tokens
        self._num_tokens[req_index] = num_tokens
        self._num_computed_tokens[req_index] = num_tokens - 1

    def _fill_blocks(
        self, launch: Launch, indices: Integers, positions: Integers, out: DecodeArrays
    ) -> None:
        n, batch, total = len(indices), len(out.req_indices), len(out.block_list)
        used = positions // self.block_size + 1
        # One entry per block, grouped by request:
        #   groups   0  0  0  1  1  2
        #   columns  0  1  2  0  1  0      the block's column in its request's block table
        groups, columns = _ragged_indices(used)
        ends = np.cumsum(used)
        blocks = self._block_tables[indices[groups], columns]
        num_blocks = int(blocks.max()) + 1 if self.contiguous else len(blocks)
        if n > batch or num_blocks > total:
            raise RuntimeError(f"{n} requests over {num_blocks} blocks do not fit {launch.bucket}")

        # Entry of each block in the block list: the block number if contiguous, else consecutive.
        entries = blocks if self.contiguous else slice(num_blocks)
        lasts = blocks[ends - 1] if self.contiguous else ends - 1
        if self.contiguous or num_blocks < total:
            # Devices without a sequence id for padding assign it to the first sequence, with weight
            # 0. Pad with the first sequence's own block: the pad block may contain NaN (see
            # fill_prefill).
            out.block_list[:] = self._block_tables[indices[0], 0]
            out.block_groups[:] = -1
            out.block_starts[:] = 0
            out.block_usage[:] = 1
        if not self.contiguous:
            out.block_list[entries] = blocks
        out.block_groups[entries] = groups
        if self.contiguous and np.count_nonzero(out.block_groups >= 0) < len(blocks):
            raise RuntimeError(
                f"requests {launch.req_indices} hold {len(blocks)} blocks, and "
                f"{np.count_nonzero(out.block_groups >= 0)} of them differ: a slice of the cache "
                "has no shared blocks"
            )
        out.block_starts[entries] = columns * self.block_size
        out.block_usage[entries] = self.block_size
        out.block_usage[lasts] = positions % self.block_size + 1

    def fill_dummy(self, out: LaunchArrays) -> None:
        """Write inputs that use only the pad block, for a warm-up or a launch without requests."""
        if isinstance(out, DraftArrays):
            self.fill_no_drafts(out)
            return
        if isinstance(out, PrefillArrays):
            batch, query = out.tokens.shape
            context = out.block_list.shape[1] * self.block_size
            max_len = self._tokens.shape[1]
            out.tokens[:] = 0
            out.positions[:] = np.minimum(context + np.arange(query), max_len - 1)
            out.slot_mapping[:] = np.resize(self._pad_slots, (batch, query))
            out.query_lens[:] = out.context_lens[:] = 0
            out.query_lens[:batch] = query
            out.context_lens[:batch] = context
            out.last_token_indices[:] = 0
            out.state_indices[:] = self.max_num_reqs
        else:
            batch, total = len(out.req_indices), len(out.block_list)
            out.positions[:] = min(self.block_size, self._tokens.shape[1]) - 1
            out.slot_mapping[:] = np.resize(self._pad_slots, batch)
            out.block_groups[:] = np.sort(np.resize(np.arange(batch), total))
            out.block_starts[:] = 0
            out.block_usage[:] = self.block_size
        out.block_list[:] = self.pad_block
        out.req_indices[:] = self.max_num_reqs

    def prompt_targets(self, req_index: int, start: int, count: int) -> Tokens:
        """Prompt tokens (uint32) that follow positions start .. start + count - 1. Positions from
        the last prompt token on have no such token, so the result may be shorter than `count`."""
        end = min(start + count + 1, int(self._num_prompt_tokens[req_index]))
        return self._tokens[req_index, start + 1 : max(end, start + 1)]

    def num_computed_tokens(self, req_index: int) -> int:
        """Number of the request's computed tokens, see BatchState."""
        return int(self._num_computed_tokens[req_index])

    def set_num_computed_tokens(self, req_index: int, count: int) -> None:
        """Set the number of computed tokens, for a drafter's state (see `follower`)."""
        self._num_computed_tokens[req_index] = count

    def block_table(self, req_index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """Block table of a request, in token order, as a view."""
        return self._block_tables[req_index, : self._num_blocks[req_index]]

    def exclusive_blocks(self, req_index: int) -> list[int]:
        """Blocks that only this request uses among the live requests (excludes a shared prefix)."""
        others = np.flatnonzero(self._is_live)
        others = others[others != req_index]
        tables = [self._block_tables[other, : self._num_blocks[other]] for other in others]
        blocks = self._block_tables[req_index, : self._num_blocks[req_index]]
        shared = np.concatenate(tables) if tables else np.empty(0, blocks.dtype)
        exclusive: list[int] = np.setdiff1d(blocks, shared).tolist()
        return exclusive

    def blocks(self, req_index: int) -> list[int]:
        """Block table of a request as a list."""
        blocks: list[int] = self._block_tables[req_index, : self._num_blocks[req_index]].tolist()
        return blocks

    def _check_live(self, launch: Launch) -> Integers:
        indices: Integers = np.asarray(launch.req_indices, np.int64)
        if len(indices) == 0 or not self._is_live[indices].all():
            raise RuntimeError(f"a launch names requests {launch.req_indices}, not all are live")
        return indices

    def _check_blocks(self, indices: Integers, lengths: Integers) -> None:
        capacity = self._num_blocks[indices] * self.block_size
        if (lengths > capacity).any():
            worst = int(np.argmax(lengths - capacity))
            raise RuntimeError(
                f"request {indices[worst]} has {lengths[worst]} tokens, its blocks hold "
                f"{capacity[worst]}"
            )

    def _slot_mapping(self, indices: Integers, positions: Integers) -> Integers:
        blocks = self._block_tables[indices, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def _advance(
        self,
        launch: Launch,
        indices: Integers,
        counts: Integers,
        lasts: Integers,
        out: PrefillArrays,
    ) -> list[int]:
        """Advance a prefill's requests, write its sampling requests and return their indices.
        `lasts`: index of each request's last token in the flattened tokens."""
        self._num_computed_tokens[indices] += counts
        samples = np.asarray(launch.samples, np.bool_)
        sampling = indices[samples]
        if (self._num_computed_tokens[sampling] != self._num_tokens[sampling]).any():
            raise RuntimeError(f"requests {sampling.tolist()} sample before their last token")
        count = len(sampling)
        out.req_indices[:count] = sampling
        out.req_indices[count:] = self.max_num_reqs
        out.last_token_indices[:count] = lasts[samples]
        out.last_token_indices[count:] = 0
        self._num_tokens[sampling] += 1
        sampling_list: list[int] = sampling.tolist()
        return sampling_list


def _ragged_indices(counts: Integers) -> tuple[Integers, Integers]:
    """Group index and index within the group of each item of ragged groups: for counts 2, 3 the
    groups are 0 0 1 1 1, and the indices 0 1 0 1 2."""
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups, np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
