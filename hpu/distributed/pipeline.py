"""Transfers between pipeline stages.

All stages run the same launches in the same order. Stage k sends the hidden states of a launch to
stage k + 1; the last stage samples and sends its tokens to the first stage, whose decodes read them
on the device.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from config.parallel import Stage
from hpu.distributed.process_groups import SINGLE, ProcessGroup


class PipelineLink:
    """Transfers of this stage, over the pipeline group.

    From the second step on, the last stage sends the last tokens of all requests once per step, as
    a tensor of a fixed shape. For P stages, the first stage receives the tokens of step n - P + 1
    after its launches of step n: the last stage finishes step n - P + 1 when the first stage
    finishes step n, so each stage waits only for its predecessor. A request that sampled in step k
    can therefore decode in step k + P.

    A send may block until its receive. Both ends use the same order within a step: the hidden
    states of the last launch, then the tokens.
    """

    def __init__(self, group: ProcessGroup = SINGLE, device: torch.device | None = None) -> None:
        """Runs an all-reduce over a `group` of several ranks: the first operation of a group must
        be a collective, not a send."""
        self.stage = Stage(group.rank, group.size)
        self._group = group
        self._num_steps = 0
        """Number of steps so far, on the first and the last stage, which exchange tokens."""
        self._num_left = 0
        """First and last stage: launches of the step that have not yet sent or received hidden
        states."""
        self._last_tokens: Tensor | None = None
        """First stage: the tensor to receive tokens into. Last stage: the tensor to send."""
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """Token sends in flight, each with the tensor that it reads."""
        if group.size > 1:
            group.all_reduce(torch.ones(1, dtype=torch.float32, device=device))

    def begin_step(self, last_tokens: Tensor, num_launches: int) -> None:
        """Begin a step of `num_launches`. `last_tokens`: last token of every request, in the same
        shape each step; read on the last stage, written on the first stage."""
        stage = self.stage
        if stage.size == 1:
            return
        # Cloned: the launches of this step overwrite the tensor before and during the send.
        self._last_tokens = last_tokens.clone() if stage.is_last else last_tokens
        self._num_left = num_launches
        if not num_launches:
            self._exchange_tokens()

    def receive_hidden(self, buffer: Tensor) -> None:
        """Fill `buffer` (B, Q, hidden) with the hidden states of the previous stage. Must be called
        before a launch, on every stage but the first."""
        self._group.recv(buffer, self.stage.rank - 1)
        if self.stage.is_last:
            self._count_launch()

    def send_hidden(self, hidden: Tensor) -> None:
        """Send `hidden` (B, Q, hidden) to the next stage. Must be called after a launch, on every
        stage but the last."""
        self._group.send(hidden.contiguous(), self.stage.rank + 1)
        if self.stage.is_first:
            self._count_launch()

    def _count_launch(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._exchange_tokens()

    def _exchange_tokens(self) -> None:
        number, size, tokens = self._num_steps, self.stage.size, self._last_tokens
        self._num_steps += 1
        if self.stage.is_last and number >= 1:
            assert tokens is not None, "a step begins with its tokens"
            # The first stage has received the tokens sent `size` steps ago.
            if len(self._sent) == size:
                self._sent.popleft()[0].wait()
            self._sent.append((self._group.isend(tokens, 0), tokens))
        elif self.stage.is_first and number >= size - 1:
            assert tokens is not None, "a step begins with its tokens"
            self._group.recv(tokens, size - 1)


SINGLE_STAGE = PipelineLink()
"""Link of a process that has all layers."""
