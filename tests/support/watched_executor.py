"""An InprocExecutor that records its plans and makes the emulated card report misuse."""

import torch

from config.engine import EngineConfig
from engine.executors.inproc import InprocExecutor
from hpu.protocol import StepPlan, ToWorker
from hpu.worker.worker import Worker

WATCHED = ("compilations", "captures", "fallbacks", "host_sync", "ungraphed")
"""Counters of the card's journal that no request may increase."""


class WatchedExecutor(InprocExecutor):
    """Records the plans; tells an emulated card when a step is prepared, so that waiting for the
    card then is an error."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(Worker(config))
        self.plans: list[StepPlan] = []

    def send(self, message: ToWorker) -> None:
        if isinstance(message, StepPlan):
            self.plans.append(message)
        card = getattr(getattr(torch, "hpu", None), "emulated", None)
        if card is None:
            super().send(message)
            return
        card.in_step = True
        try:
            super().send(message)
        finally:
            card.in_step = False
