"""The launch benchmark: its counters, and that it restores everything."""

import time

import torch

from benchmarks.launch import OURS, measure, open_device
from benchmarks.stopwatch import Stopwatch
from hpu.emulator.card.graphs import HPUGraph
from hpu.runner.model_runner import ModelRunner


class Dinner:
    def cook(self) -> None:
        time.sleep(0.01)
        self.wash()

    def wash(self) -> None:
        time.sleep(0.5)


class Supper(Dinner):
    pass


def test_a_timed_method_excludes_the_time_of_other_timed_methods() -> None:
    with Stopwatch() as stopwatch:
        stopwatch.watch(Supper, "cook")
        stopwatch.watch(Dinner, "wash")
        Supper().cook()
        seconds, calls = stopwatch.take()

    assert 0.01 <= seconds["Supper.cook"] < 0.4 <= seconds["Dinner.wash"]
    assert calls == {"Supper.cook": 1, "Dinner.wash": 1}
    assert "cook" not in vars(Supper) and not hasattr(Dinner.wash, "__wrapped__")


def test_a_greedy_step_is_two_replays_two_recipes_and_one_copy_each_way() -> None:
    before = HPUGraph.replayV3
    backend = open_device("hpu-emulator")
    try:
        with torch.inference_mode():
            runs = [measure(backend, 2, 40, 4, computes=way) for way in (False, True)]
            several, several_counts = measure(backend, 2, 40, 4, computes=True, decodes=3)
    finally:
        backend.close()

    for numbers, counts in runs:
        assert counts["graphs replayed"] == 2
        # Six operators: a copy each way, two that write the last tokens into the inputs, and two
        # that store and copy the new tokens.
        assert counts["operators beside the graphs, views included"] == 6
        assert counts["recipes launched for them"] == 2
        assert counts["copies to the device"] == counts["copies to the host"] == 1
        assert all(numbers[part] > 0 for part in OURS)
    assert several_counts["graphs replayed"] == several_counts["copies to the device"] * 2 == 6
    assert all(several[part] > 0 for part in OURS)
    assert HPUGraph.replayV3 is before and not hasattr(ModelRunner.submit, "__wrapped__")
