"""Queue of adapters to read: clients take turns, and an adapter whose client has left is not
read."""

import threading
from collections.abc import Iterator

import pytest

from config.engine import EngineConfig
from config.errors import Overloaded
from config.lora.info import LoRAInfo
from config.params.lora import NamedAdapter
from engine.core.adapter_reader import MAX_PENDING, AdapterReader
from engine.core.loop import EngineLoop
from engine.transport.messages import CancelControl, Control, FromEngine, Reply

TIMEOUT_S = 20


class GatedReader(AdapterReader):
    """Reads no adapter before `gate` is set, and records which adapters were read."""

    def __init__(self) -> None:
        super().__init__(EngineConfig("none"))
        self.gate = threading.Event()
        self.names: list[str] = []

    def read(self, adapter: NamedAdapter) -> LoRAInfo:
        self.names.append(adapter.name)
        assert self.gate.wait(TIMEOUT_S)
        return LoRAInfo(adapter.name, adapter.path, "content", 1, 1)


@pytest.fixture
def reader() -> Iterator[GatedReader]:
    made = GatedReader()
    yield made
    made.gate.set()
    made.close()


def test_a_client_with_many_adapters_does_not_exclude_another_client(reader: GatedReader) -> None:
    many = [reader.submit(NamedAdapter(f"a{n}", "/a"), "a") for n in range(MAX_PENDING)]
    with pytest.raises(Overloaded, match="64 adapters of this client wait or run, at most 64 are"):
        reader.submit(NamedAdapter("more", "/a"), "a")

    other = reader.submit(NamedAdapter("b", "/b"), "b")
    reader.gate.set()

    assert other.result(TIMEOUT_S).name == "b" and many[-1].result(TIMEOUT_S)
    assert reader.names[:3] == ["a0", "b", "a1"]


@pytest.mark.parametrize("is_front_end", [True, False])
def test_an_adapter_whose_client_left_is_not_read(
    monkeypatch: pytest.MonkeyPatch, reader: GatedReader, is_front_end: bool
) -> None:
    told: list[FromEngine] = []
    loop = EngineLoop(
        EngineConfig("none"), lambda _, message: told.append(message), num_front_ends=1
    )
    monkeypatch.setattr(loop, "_adapters", reader)
    for call in range(4):
        adapter = (f"a{call}", "/a", None, "/", "a")
        arguments = {"adapter": adapter, "client": "a"}
        loop.receive(0, Control(call, "load_lora_adapter", arguments))

    if is_front_end:
        loop.front_end_changed(0, is_connected=False)
    else:
        for call in (1, 3):
            loop.receive(0, CancelControl(call))
    last = reader.submit(NamedAdapter("last", "/a"), "a")
    reader.gate.set()
    last.result(TIMEOUT_S)

    assert reader.names == (["a0", "last"] if is_front_end else ["a0", "a2", "last"])
    assert not any(isinstance(message, Reply) for message in told) and not loop._calls
