"""BatchState: what the host keeps of each live sequence, in fixed arrays, and how it fills a
bucket's
inputs. Knows no models; device tensors only as the arrays it writes to."""

import numpy as np

from hpu.protocol import Launch, NewRequest, RequestSampling
from hpu.runner.input_buffers import DecodeFields, PrefillFields

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Tokens = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


class BatchState:
    """`max_rows` rows of at most `max_model_len` tokens, over blocks 0 .. `pad_block` - 1.
    A row is free, or admitted. Of an admitted row's `num_known` tokens the first
    `num_computed_tokens`
    have their keys and values in its blocks. A launch moves both at once, when it is filled, so the
    next plan may follow before the device is done: the token a row samples counts as known, though
    only the device knows its value.

    A plan that breaks this is a bug of the engine: RuntimeError, with the numbers that disagree.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        pad_block: int,
        *,
        contiguous: bool = False,
    ) -> None:
        """`contiguous`: a decode over N blocks describes the blocks 0 .. N - 1 in this order, and
        no two of its rows may share one."""
        self.max_rows = max_rows
        self.block_size = block_size
        self.pad_block = pad_block
        self.contiguous = contiguous
        blocks_a_row = -(-max_model_len // block_size)
        self._tables = np.zeros((max_rows, blocks_a_row), np.int32)
        self._num_blocks = np.zeros(max_rows, np.int64)
        self._num_computed = np.zeros(max_rows, np.int64)
        self._num_known = np.zeros(max_rows, np.int64)
        self._num_prompt = np.zeros(max_rows, np.int64)
        self._tokens = np.zeros((max_rows, max_model_len), np.uint32)
        self._is_live = np.zeros(max_rows, np.bool_)
        self.num_logprobs = np.full(max_rows, -1, np.int64)
        """(max_rows,): what each row's caller asked for; -1 none."""
        self.num_prompt_logprobs = np.full(max_rows, -1, np.int64)
        self._pad_slots = pad_block * block_size + np.arange(block_size)

    def free(self, row: int) -> None:
        """Forget a row."""
        if not 0 <= row < self.max_rows or not self._is_live[row]:
            raise RuntimeError(f"row {row} of {self.max_rows} is freed, but it holds no sequence")
        self._is_live[row] = False
        self._num_blocks[row] = 0
        self.num_logprobs[row] = -1
        self.num_prompt_logprobs[row] = -1

    def admit(self, new: NewRequest) -> Tokens:
        """Take a sequence into a free row; gives its tokens (uint32) as kept here."""
        row = new.req_index
        tokens = np.frombuffer(new.tokens, np.dtype("<u4"))
        if not 0 <= row < self.max_rows or self._is_live[row]:
            raise RuntimeError(f"row {row} of {self.max_rows} is not free for a new sequence")
        if not new.num_computed_tokens < len(tokens) <= self._tokens.shape[1]:
            raise RuntimeError(
                f"row {row}: {len(tokens)} tokens, {new.num_computed_tokens} of them computed, "
                f"in a row of {self._tokens.shape[1]}"
            )
        self._is_live[row] = True
        self._tokens[row, : len(tokens)] = tokens
        self._num_known[row] = len(tokens)
        self._num_prompt[row] = new.num_prompt_tokens
        self._num_computed[row] = new.num_computed_tokens
        self._num_blocks[row] = 0
        self.grow(row, new.blocks)
        if new.num_computed_tokens > len(new.blocks) * self.block_size:
            raise RuntimeError(
                f"row {row}: {new.num_computed_tokens} computed tokens do not fit "
                f"{len(new.blocks)} blocks"
            )
        sampling: RequestSampling = new.sampling
        self.num_logprobs[row] = sampling.num_logprobs
        self.num_prompt_logprobs[row] = sampling.num_prompt_logprobs
        return self._tokens[row, : len(tokens)]

    def grow(self, row: int, blocks: list[int]) -> None:
        """Lend more blocks to a row, at the end of its table."""
        held = int(self._num_blocks[row])
        total = held + len(blocks)
        if not self._is_live[row] or total > self._tables.shape[1]:
            raise RuntimeError(f"row {row}: {total} blocks, it takes {self._tables.shape[1]}")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.pad_block:
            raise RuntimeError(f"row {row}: blocks {blocks} of 0 .. {self.pad_block - 1}")
        self._tables[row, held:total] = blocks
        self._num_blocks[row] = total

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Let every row that names block sources[i] name targets[i] instead."""
        if not all(0 <= block < self.pad_block for block in (*sources, *targets)):
            raise RuntimeError(
                f"blocks {sources} are moved to {targets}, there are 0 .. {self.pad_block - 1}"
            )
        new = np.arange(self.pad_block + 1, dtype=np.int32)
        new[sources] = targets
        live = np.flatnonzero(self._is_live)
        self._tables[live] = new[self._tables[live]]

    def fill_prefill(self, launch: Launch, out: PrefillFields) -> list[int]:
        """Write a prefill's inputs and move its rows on; gives the rows that sample, in order."""
        rows = self._live(launch)
        counts: Integers = np.asarray(launch.query_lens, np.int64)
        batch, query = out.tokens.shape
        blocks = out.block_list.shape[1]
        n = len(rows)
        if not (len(counts) == len(launch.samples) == n) or n > batch or counts.max() > query:
            raise RuntimeError(
                f"{n} rows of up to {counts.max(initial=0)} tokens do not fit {launch.bucket}"
            )
        computed = self._num_computed[rows]
        if counts.min() < 1 or (computed + counts > self._num_known[rows]).any():
            raise RuntimeError(
                f"counts {launch.query_lens} pass the known tokens of rows {launch.req_indices}"
            )
        context_blocks = -(-computed // self.block_size)
        if context_blocks.max() > blocks:
            raise RuntimeError(f"{context_blocks.max()} context blocks do not fit {launch.bucket}")
        self._check_blocks(rows, computed + counts)

        positions = computed[:, None] + np.arange(query)
        if n == batch and counts.min() == query:
            # Nothing is padded: what a prompt alone always is where shapes follow the prompts.
            out.tokens[:] = self._tokens[rows[:, None], positions]
            out.positions[:] = positions
            out.slot_mapping[:] = self._slots(rows[:, None], positions)
        else:
            self._fill_padded(rows, counts, positions, out)
        out.query_lens[:n] = counts
        out.query_lens[n:] = 0
        out.context_lens[:n] = computed
        out.context_lens[n:] = 0
        out.block_list[:] = self.pad_block
        width = min(blocks, self._tables.shape[1])
        held = np.arange(width) < context_blocks[:, None]
        out.block_list[:n, :width][held] = self._tables[rows, :width][held]
        return self._move_on(launch, rows, counts, out)

    def _fill_padded(
        self, rows: Integers, counts: Integers, positions: Integers, out: PrefillFields
    ) -> None:
        n, (batch, query) = len(rows), out.tokens.shape
        is_real = np.arange(query) < counts[:, None]
        positions = np.where(is_real, positions, 0)
        pads = np.resize(self._pad_slots, (batch, query))
        out.tokens[:n] = np.where(is_real, self._tokens[rows[:, None], positions], 0)
        out.tokens[n:] = 0
        out.positions[:n] = positions
        out.positions[n:] = 0
        out.slot_mapping[:n] = np.where(is_real, self._slots(rows[:, None], positions), pads[:n])
        out.slot_mapping[n:] = pads[n:]

    def fill_decode(self, launch: Launch, out: DecodeFields) -> None:
        """Write a decode's inputs and move its rows on; all of them sample."""
        rows = self._live(launch)
        n = len(rows)
        positions = self._num_computed[rows]
        if (positions != self._num_known[rows] - 1).any():
            raise RuntimeError(
                f"requests {launch.req_indices}: a decode needs exactly one uncomputed token"
            )
        self._check_blocks(rows, positions + 1)
        self._fill_blocks(launch, rows, positions, out)

        out.rows[:n] = rows
        out.positions[:n, 0] = positions
        out.slot_mapping[:n] = self._slots(rows, positions)
        if n < len(out.rows):
            out.rows[n:] = self.max_rows
            out.positions[n:] = 0
            out.slot_mapping[n:] = np.resize(self._pad_slots, len(out.slot_mapping) - n)
        self._num_computed[rows] += 1
        self._num_known[rows] += 1

    def _fill_blocks(
        self, launch: Launch, rows: Integers, positions: Integers, out: DecodeFields
    ) -> None:
        """Describe the blocks that a decode of `rows` at `positions` reads."""
        n, batch, total = len(rows), len(out.rows), len(out.block_list)
        used = positions // self.block_size + 1
        # One entry a block, all of row 0, then all of row 1, ...:
        #   groups   0  0  0  1  1  2
        #   places   0  1  2  0  1  0      the block's place in its row's table
        groups = np.repeat(np.arange(n), used)
        ends = np.cumsum(used)
        places = np.arange(len(groups)) - np.repeat(ends - used, used)
        blocks = self._tables[rows[groups], places]
        wanted = int(blocks.max()) + 1 if self.contiguous else len(blocks)
        if n > batch or wanted > total:
            raise RuntimeError(f"{n} rows over {wanted} blocks do not fit {launch.bucket}")

        # Where each block's entry stands: at its own number, or one behind the other.
        entries = blocks if self.contiguous else slice(wanted)
        lasts = blocks[ends - 1] if self.contiguous else ends - 1
        if self.contiguous or wanted < total:
            out.block_list[:] = self.pad_block
            out.block_groups[:] = -1
            out.block_starts[:] = 0
            out.block_usage[:] = 1
        if not self.contiguous:
            out.block_list[entries] = blocks
        out.block_groups[entries] = groups
        if self.contiguous and np.count_nonzero(out.block_groups >= 0) < len(blocks):
            raise RuntimeError(
                f"rows {launch.req_indices} hold {len(blocks)} blocks, "
                f"{np.count_nonzero(out.block_groups >= 0)} different ones: a slice shows each once"
            )
        out.block_starts[entries] = places * self.block_size
        out.block_usage[entries] = self.block_size
        out.block_usage[lasts] = positions % self.block_size + 1

    def fill_idle(self, out: PrefillFields | DecodeFields) -> None:
        """Write inputs as of full rows whose blocks are all the pad block: for a warm-up."""
        if isinstance(out, PrefillFields):
            batch, query = out.tokens.shape
            context = out.block_list.shape[1] * self.block_size
            longest = self._tokens.shape[1]
            out.tokens[:] = 0
            out.positions[:] = np.minimum(context + np.arange(query), longest - 1)
            out.slot_mapping[:] = np.resize(self._pad_slots, (batch, query))
            out.query_lens[:] = query
            out.context_lens[:] = context
            out.last[:] = 0
        else:
            batch, total = len(out.rows), len(out.block_list)
            out.positions[:] = min(self.block_size, self._tokens.shape[1]) - 1
            out.slot_mapping[:] = np.resize(self._pad_slots, batch)
            out.block_groups[:] = np.sort(np.resize(np.arange(batch), total))
            out.block_starts[:] = 0
            out.block_usage[:] = self.block_size
        out.block_list[:] = self.pad_block
        out.rows[:] = self.max_rows

    def prompt_targets(self, row: int, start: int, count: int) -> Tokens:
        """The prompt tokens (uint32) that follow positions start .. start + count - 1; the last
        token of a prompt has none after it, so there may be one fewer."""
        end = min(start + count + 1, int(self._num_prompt[row]))
        return self._tokens[row, start + 1 : max(end, start + 1)]

    def num_computed_tokens(self, row: int) -> int:
        """Tokens of the row whose keys and values lie in its blocks, or will."""
        return int(self._num_computed[row])

    def own_blocks(self, row: int) -> list[int]:
        """The blocks of `row` that no other live row holds: the others are a shared prefix."""
        others = np.flatnonzero(self._is_live)
        others = others[others != row]
        held = [self._tables[other, : self._num_blocks[other]] for other in others]
        own = self._tables[row, : self._num_blocks[row]]
        shared = np.concatenate(held) if held else np.empty(0, own.dtype)
        own_only: list[int] = np.setdiff1d(own, shared).tolist()
        return own_only

    def _live(self, launch: Launch) -> Integers:
        rows: Integers = np.asarray(launch.req_indices, np.int64)
        if len(rows) == 0 or not self._is_live[rows].all():
            raise RuntimeError(f"a launch names rows {launch.req_indices}, not all hold a sequence")
        return rows

    def _check_blocks(self, rows: Integers, lengths: Integers) -> None:
        room = self._num_blocks[rows] * self.block_size
        if (lengths > room).any():
            worst = int(np.argmax(lengths - room))
            raise RuntimeError(
                f"row {rows[worst]} comes to {lengths[worst]} tokens, its blocks hold {room[worst]}"
            )

    def _slots(self, rows: Integers, positions: Integers) -> Integers:
        blocks = self._tables[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def _move_on(
        self, launch: Launch, rows: Integers, counts: Integers, out: PrefillFields
    ) -> list[int]:
        self._num_computed[rows] += counts
        samples = np.asarray(launch.samples, np.bool_)
        sampling = rows[samples]
        if (self._num_computed[sampling] != self._num_known[sampling]).any():
            raise RuntimeError(f"rows {sampling.tolist()} sample before their last known token")
        width = out.tokens.shape[1]
        count = len(sampling)
        out.rows[:count] = sampling
        out.rows[count:] = self.max_rows
        out.last[:count] = (np.arange(len(rows)) * width + counts - 1)[samples]
        out.last[count:] = 0
        self._num_known[sampling] += 1
        return [int(row) for row in sampling]
