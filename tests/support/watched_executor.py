"""An InprocExecutor that records its calls and makes the emulated card report misuse."""

import torch

from config.engine import EngineConfig
from engine.executors.inproc import InprocExecutor
from hpu.protocol import StepPlan

WATCHED = ("compilations", "captures", "fallbacks", "host_sync", "ungraphed")
"""What a card's journal counts, and no request may cause."""


class WatchedExecutor(InprocExecutor):
    """Keeps the plans; tells an emulated card when a step is made: waiting for it is a misuse."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        card = getattr(getattr(torch, "hpu", None), "emulated", None)
        if card is None:
            super().submit(plan)
            return
        card.in_step = True
        try:
            super().submit(plan)
        finally:
            card.in_step = False
