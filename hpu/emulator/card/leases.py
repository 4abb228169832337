"""How long a graph's tensors may be read: outputs until the next replay, first inputs until other
inputs are copied over them, freed intermediates never. Knows no ops."""

from dataclasses import dataclass


@dataclass(slots=True)
class Generation:
    """How often a graph was replayed."""

    value: int = 0


@dataclass(slots=True)
class OutputLease:
    """Ends when the graph is replayed again."""

    generation: Generation
    until: int
    kind: str = "stale_output"
    text: str = "a graph's output is read after the graph's next replay has overwritten it"

    def is_over(self) -> bool:
        return self.generation.value != self.until

    def renew(self) -> None:
        self.until = self.generation.value


@dataclass(slots=True)
class InputLease:
    """Ends when a later call's inputs are copied into the first call's tensor."""

    overwritten: bool = False
    kind: str = "input_overwritten"
    text: str = "the first call's input holds the inputs of a later call"

    def is_over(self) -> bool:
        return self.overwritten

    def renew(self) -> None:
        self.overwritten = False


@dataclass(slots=True)
class FreedLease:
    """An intermediate of a graph without tensor cache; it is gone for good."""

    kind: str = "freed_intermediate"
    text: str = "an intermediate was freed after capture; list it in cache_tensors_list"

    def is_over(self) -> bool:
        return True

    def renew(self) -> None:
        return
