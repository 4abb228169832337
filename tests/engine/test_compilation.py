"""engine/compilation.py: each spec once, on other threads, and no more of them than may wait."""

import threading
from pathlib import Path

import pytest
from tiny_models import EOS, VOCAB_SIZE, write_tokenizer

from config.engine import EngineConfig
from config.errors import Overloaded, UserError
from config.grammar import GrammarSpec
from config.sampling import SamplingParams
from engine import compilation
from engine.compilation import Compiler
from engine.grammar import Grammar
from engine.loop import EngineLoop
from engine.messages import Abort, AddRequest, Control, FromEngine, Reply

TIMEOUT_S = 20


def started(folder: Path) -> Compiler:
    compiler = Compiler()
    compiler.start(str(folder), VOCAB_SIZE, frozenset([EOS]))
    return compiler


def test_a_spec_is_compiled_once_and_so_is_a_refusal(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    good, bad = GrammarSpec("regex", "a+"), GrammarSpec("regex", "(")

    grammars = [compiler.compile(GrammarSpec("regex", "a+")).result(TIMEOUT_S) for _ in range(2)]
    errors = [compiler.compile(bad).exception(TIMEOUT_S) for _ in range(2)]

    assert grammars[0] is grammars[1] is compiler.compile(good).result(TIMEOUT_S)
    assert isinstance(errors[0], UserError) and errors[0] is errors[1]
    compiler.close()


def test_without_a_tokenizer_every_spec_is_refused(tmp_path: Path) -> None:
    compiler = started(tmp_path)

    error = compiler.compile(GrammarSpec("json_object")).exception(TIMEOUT_S)

    assert isinstance(error, UserError) and "tokenizer.json" in error.message
    compiler.close()


def test_more_specs_than_may_wait_are_refused_and_the_oldest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    compiler, gate = Compiler(), threading.Event()
    for _ in range(compilation.NUM_THREADS):
        compiler._threads.submit(gate.wait, TIMEOUT_S)
    compiler.start(str(tmp_path), VOCAB_SIZE, frozenset([EOS]))
    monkeypatch.setattr(compilation, "MAX_KEPT", 0)
    specs = [GrammarSpec("regex", "a" * (n + 1)) for n in range(compilation.MAX_PENDING)]

    made = [compiler.compile(spec) for spec in specs]
    with pytest.raises(Overloaded, match=f"{len(specs)} grammars wait"):
        compiler.compile(GrammarSpec("regex", "b"))
    gate.set()

    assert all(isinstance(one.result(TIMEOUT_S), Grammar) for one in made)
    compiler.compile(GrammarSpec("regex", "b")).result(TIMEOUT_S)
    again = compiler.compile(specs[0])
    assert again is not made[0] and again.result(TIMEOUT_S) is not made[0].result()
    compiler.close()


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_never_comes_in(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    told: list[FromEngine] = []
    loop = EngineLoop(
        EngineConfig("none"), lambda _, message: told.append(message), num_front_ends=1
    )
    gate = threading.Event()
    for _ in range(compilation.NUM_THREADS):
        loop._compiler._threads.submit(gate.wait, TIMEOUT_S)
    loop._compiler.start(str(tmp_path), VOCAB_SIZE, frozenset([EOS]))
    sampling = SamplingParams(structured_outputs={"regex": "a"})

    for key in (1, 2):
        loop.receive(0, AddRequest(key, memoryview(b"\1\0\0\0"), sampling))
    loop.receive(0, AddRequest(3, memoryview(b"\1\0\0\0"), SamplingParams()))
    loop.receive(0, Abort([1]))
    gate.set()
    for regex in ("a", "("):
        loop.receive(0, Control(7, "compile_grammar", {"spec": ["regex", regex]}))
    loop._compiler._threads.shutdown(wait=True)

    entered = [loop._inbox.get_nowait() for _ in range(loop._inbox.qsize())]
    keys = [entry[1].key for entry in entered if isinstance(entry[1], AddRequest)]
    assert keys == [3, 2]
    replies = [message for message in told if isinstance(message, Reply)]
    assert sorted(reply.error is None for reply in replies) == [False, True]
    assert len(replies) == len(told)
