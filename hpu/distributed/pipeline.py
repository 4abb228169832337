"""Pipeline stages: which layers a stage has, and what it sends to the others.

All stages run the same launches in the same order. Stage k sends the hidden states of a launch to
stage k + 1; the last stage samples, and its tokens go to the first one, whose decodes read them on
the device.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from config.parallel import Stage
from hpu.distributed.process_groups import SINGLE, ProcessGroup


class PipelineLink:
    """The transfers of one stage, over the pipeline group.

    The last tokens of all requests travel as one tensor of a fixed shape, once per step. With P
    stages the first one receives, after its launches of step n, those after step n - P + 1: the
    last stage is done with that step when the first is done with step n, so nobody waits for more
    than its own predecessor. A request that sampled in step k may therefore decode in step k + P.

    A send may wait for its receive. Within a step both ends have the same order: of the last
    launch the hidden states, then the tokens.
    """

    def __init__(self, group: ProcessGroup = SINGLE, device: torch.device | None = None) -> None:
        """Meets the other stages, for which a first collective precedes all sends."""
        self.stage = Stage(group.rank, group.size)
        self._group = group
        self._num_steps = 0
        """Since the process started: the other stages count alike."""
        self._num_left = 0
        """Launches of the step that have not yet sent or received hidden states."""
        self._last_tokens: Tensor | None = None
        """On the first stage the tensor to receive tokens into, on the last one that to send."""
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """Sends of tokens in flight, and what they read."""
        if group.size > 1:
            group.all_reduce(torch.ones(1, dtype=torch.float32, device=device))

    def begin_step(self, last_tokens: Tensor, num_launches: int) -> None:
        """Before a step of `num_launches`. `last_tokens`: of all requests, of the same shape in
        each step; read on the last stage, and written on the first."""
        stage = self.stage
        if stage.size == 1:
            return
        # The step's own samples go with the next one.
        self._last_tokens = last_tokens.clone() if stage.is_last else last_tokens
        self._num_left = num_launches
        if not num_launches:
            self._exchange_tokens()

    def receive_hidden(self, buffer: Tensor) -> None:
        """Before a launch, on a stage that is not the first: fill `buffer` (B, Q, hidden) with the
        hidden states of the previous stage."""
        self._group.recv(buffer, self.stage.rank - 1)
        if self.stage.is_last:
            self._count_launch()

    def send_hidden(self, hidden: Tensor) -> None:
        """After a launch, on a stage that is not the last: send `hidden` (B, Q, hidden) to the next
        stage."""
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
            # The first stage has received the tokens of `size` steps ago.
            if len(self._sent) == size:
                self._sent.popleft()[0].wait()
            self._sent.append((self._group.isend(tokens, 0), tokens))
        elif self.stage.is_first and number >= size - 1:
            assert tokens is not None, "a step begins with its tokens"
            self._group.recv(tokens, size - 1)


SINGLE_STAGE = PipelineLink()
"""Of a process that has all layers."""
