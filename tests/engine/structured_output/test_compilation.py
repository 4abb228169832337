"""engine/structured_output/compilation.py: each spec is compiled once, on another thread, within
the limits of a fork."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from delays import least
from live import alive, children_of, cpu_seconds
from msgspec import structs
from tiny_models import EOS, SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer
from tokenizers import Tokenizer, decoders, models
from waits import WAIT_S, wait_for

from config.engine import EngineConfig
from config.errors import Overloaded, UserError
from config.params.sampling import SamplingParams
from config.params.structured_output import FREE, GrammarSpec
from engine.core.loop import EngineLoop
from engine.process import isolation
from engine.process.isolation import Cancellation, ForkServer
from engine.structured_output import compilation
from engine.structured_output.compilation import LIMITS, GrammarCompiler
from engine.structured_output.grammar import Grammar
from engine.transport.messages import (
    Abort,
    AddRequest,
    CancelControl,
    Control,
    FromEngine,
    Reply,
)


def started(folder: Path) -> GrammarCompiler:
    compiler = GrammarCompiler()
    compiler.start(str(folder), VOCAB_SIZE, frozenset([EOS]))
    return compiler


def test_a_spec_is_compiled_once_and_refused_once(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    good, bad = GrammarSpec("regex", "a+"), GrammarSpec("regex", "(")

    grammars = [compiler.compile(GrammarSpec("regex", "a+")).result(WAIT_S) for _ in range(2)]
    errors = [compiler.compile(bad).exception(WAIT_S) for _ in range(2)]

    assert grammars[0] is grammars[1] is compiler.compile(good).result(WAIT_S)
    assert isinstance(errors[0], UserError) and errors[0] is errors[1]
    compiler.close()


def test_without_a_tokenizer_every_spec_is_refused(tmp_path: Path) -> None:
    compiler = started(tmp_path)

    error = compiler.compile(GrammarSpec("json_object")).exception(WAIT_S)

    assert isinstance(error, UserError) and "tokenizer.json" in error.message
    compiler.close()


def test_the_queue_and_the_cache_of_specs_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    compiler, gate = GrammarCompiler(), threading.Event()
    for _ in range(compilation.NUM_THREADS):
        compiler._threads.submit(gate.wait, WAIT_S)
    compiler.start(str(tmp_path), VOCAB_SIZE, frozenset([EOS]))
    monkeypatch.setattr(compilation, "MAX_CACHED", 0)
    specs = [GrammarSpec("regex", "a" * (n + 1)) for n in range(compilation.MAX_PENDING)]

    made = [compiler.compile(spec) for spec in specs]
    with pytest.raises(Overloaded, match=f"{len(specs)} grammars of this client wait"):
        compiler.compile(GrammarSpec("regex", "b"))
    gate.set()

    assert all(isinstance(item.result(WAIT_S), Grammar) for item in made)
    compiler.compile(GrammarSpec("regex", "b")).result(WAIT_S)
    again = compiler.compile(specs[0])
    assert again is not made[0] and again.result(WAIT_S) is not made[0].result()
    compiler.close()


def test_a_request_aborted_during_compilation_is_never_added(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    told: list[FromEngine] = []
    loop = EngineLoop(
        EngineConfig("none"), lambda _, message: told.append(message), num_front_ends=1
    )
    gate = threading.Event()
    for _ in range(compilation.NUM_THREADS):
        loop._compiler._threads.submit(gate.wait, WAIT_S)
    loop._compiler.start(str(tmp_path), VOCAB_SIZE, frozenset([EOS]))
    sampling = SamplingParams(structured_outputs={"regex": "a"})

    for key in (1, 2):
        loop.receive(0, AddRequest(key, memoryview(b"\1\0\0\0"), sampling))
    loop.receive(0, AddRequest(3, memoryview(b"\1\0\0\0"), SamplingParams()))
    loop.receive(0, Abort([1]))
    gate.set()
    for call, pattern in enumerate(("a", "(")):
        loop.receive(0, Control(call, "compile_grammar", {"spec": ["regex", pattern]}))
    loop._compiler._threads.shutdown(wait=True)
    loop._compiler.close()

    entered = [loop._inbox.get_nowait() for _ in range(loop._inbox.qsize())]
    keys = [entry[1].key for entry in entered if isinstance(entry[1], AddRequest)]
    assert keys == [3, 2]
    replies = [message for message in told if isinstance(message, Reply)]
    assert sorted(reply.error is None for reply in replies) == [False, True]
    assert len(replies) == len(told)


def test_an_engine_that_ends_does_not_reject_requests_whose_grammar_is_compiled(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    told: list[FromEngine] = []
    loop = EngineLoop(
        EngineConfig("none"), lambda _, message: told.append(message), num_front_ends=1
    )
    gate = threading.Event()
    for _ in range(compilation.NUM_THREADS):
        loop._compiler._threads.submit(gate.wait, WAIT_S)
    loop._compiler.start(str(tmp_path), VOCAB_SIZE, frozenset([EOS]))
    sampling = SamplingParams(structured_outputs={"regex": "a"})

    loop.receive(0, AddRequest(1, memoryview(b"\1\0\0\0"), sampling))
    assert loop._compiler._fork_server is not None
    loop._compiler._fork_server.close()
    gate.set()
    loop._compiler._threads.shutdown(wait=True)

    # Another engine may continue the request.
    assert told == [] and loop._inbox.qsize() == 0
    loop._compiler.close()


def test_overload_and_refusal_of_a_grammar_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    told: list[FromEngine] = []
    loop = EngineLoop(
        EngineConfig("none"), lambda _, message: told.append(message), num_front_ends=1
    )
    gate = threading.Event()
    monkeypatch.setattr(loop._compiler, "_compile_checked", lambda spec, _: gate.wait(WAIT_S))
    for number in range(compilation.MAX_PENDING):
        loop._compiler.compile(GrammarSpec("regex", "a" * number))

    loop.receive(0, Control(7, "compile_grammar", {"spec": ["regex", "b"]}))
    gate.set()

    (reply,) = told
    assert isinstance(reply, Reply) and reply.is_overload and not reply.is_refusal
    loop._compiler.close()


class GatedCompiler(GrammarCompiler):
    """Compiles no spec before `gate` is set, and records which specs were started."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.started: list[str] = []
        self.cancellations: list[Cancellation] = []

    def _compile_checked(self, spec: GrammarSpec, cancellation: Cancellation) -> Grammar:
        self.started.append(spec.text)
        self.cancellations.append(cancellation)
        if spec.text.startswith("slow"):
            assert self.gate.wait(WAIT_S)
        grammar = Grammar(GrammarSpec(FREE), cast(Any, None))
        grammar.source = spec.text
        return grammar

    def wait_started(self, count: int) -> None:
        end = time.monotonic() + WAIT_S
        while len(self.started) < count and time.monotonic() < end:
            time.sleep(0.001)

    def close(self) -> None:
        self.gate.set()
        super().close()


@pytest.fixture
def gated() -> Iterator[GatedCompiler]:
    compiler = GatedCompiler()
    yield compiler
    compiler.close()


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def test_a_client_with_slow_specs_leaves_room_and_a_thread_to_other_clients(
    gated: GatedCompiler,
) -> None:
    slow = [gated.compile(regex(f"slow {n}"), "a") for n in range(compilation.MAX_PENDING)]
    with pytest.raises(Overloaded, match="64 grammars of this client wait or run, at most 64 are"):
        gated.compile(regex("more"), "a")

    other = gated.compile(regex("other"), "b")

    assert other.result(WAIT_S).source == "other"
    gated.wait_started(3)
    assert sorted(gated.started) == ["other", "slow 0", "slow 1"]
    gated.gate.set()
    assert [future.result(WAIT_S).source for future in slow[-2:]] == ["slow 62", "slow 63"]


def test_a_spec_that_another_client_queued_is_compiled_in_the_first_turn(
    gated: GatedCompiler,
) -> None:
    queued = [gated.compile(regex(f"slow {n}"), "a") for n in range(9)]
    last = gated.compile(regex("wanted"), "a")

    wanted = gated.compile(regex("wanted"), "b")

    assert wanted is last and wanted.result(WAIT_S).source == "wanted"
    gated.wait_started(3)
    assert len(gated.started) == 3
    gated.gate.set()
    assert queued[-1].result(WAIT_S) and gated.started.count("wanted") == 1


def test_specs_whose_clients_have_left_are_not_compiled(gated: GatedCompiler) -> None:
    left = [gated.compile(regex(f"slow {n}"), "a") for n in range(compilation.MAX_PENDING)]
    gated.wait_started(2)

    for future in left:
        gated.withdraw(future, "a")

    assert [each.is_cancelled for each in gated.cancellations] == [True, True]
    assert all(future.cancelled() for future in left[2:])
    again = [gated.compile(regex(f"again {n}"), "a") for n in range(20)]
    gated.gate.set()
    assert all(future.result(WAIT_S) for future in again) and len(gated.started) == 22
    assert not gated._pending and len(gated._cached) == 20


def test_a_spec_is_compiled_while_a_client_waits(gated: GatedCompiler) -> None:
    running = gated.compile(regex("slow"), "a")
    gated.wait_started(1)
    filler = [gated.compile(regex(f"slow {n}"), "a") for n in range(3)]
    assert gated.compile(regex("slow"), "b") is running
    queued = [gated.compile(regex("both"), "a") for _ in range(2)]

    gated.withdraw(running, "a")
    gated.withdraw(queued[0], "a")
    gated.gate.set()

    assert running.result(WAIT_S).source == "slow" and filler[-1].result(WAIT_S)
    assert queued[0].result(WAIT_S).source == "both"
    gated.withdraw(running, "b")
    assert gated.compile(regex("slow"), "b") is running


def test_the_fork_of_a_withdrawn_spec_is_killed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    assert compiler._fork_server is not None
    compiler.compile(regex("a")).result(WAIT_S)
    pid = compiler._fork_server.pid
    assert pid is not None

    def delay_s() -> float:
        wait_for(lambda: not children_of(pid))
        # The compilation takes a second.
        future = compiler.compile(regex("[ab]?" * 8_500), "a")
        wait_for(lambda: children_of(pid))
        start = time.monotonic()
        compiler.withdraw(future, "a")
        assert isinstance(future.exception(WAIT_S), Overloaded)
        return time.monotonic() - start

    assert least(delay_s, 0.5) < 0.5
    compiler.close()


@pytest.mark.parametrize("end", ["cancel", "abort", "front end"])
def test_a_request_that_ends_withdraws_its_grammar(
    monkeypatch: pytest.MonkeyPatch, gated: GatedCompiler, end: str
) -> None:
    told: list[FromEngine] = []
    loop = EngineLoop(
        EngineConfig("none"), lambda _, message: told.append(message), num_front_ends=1
    )
    monkeypatch.setattr(loop, "_compiler", gated)
    for call in range(2):
        arguments = {"spec": ["regex", f"slow {call}"], "client": "a"}
        loop.receive(0, Control(call, "compile_grammar", arguments))
    gated.wait_started(2)
    sampling = SamplingParams(structured_outputs={"regex": "slow request"})
    loop.receive(0, AddRequest(1, memoryview(b"\1\0\0\0"), sampling))
    gated.wait_started(3)
    running = list(gated._pending)

    if end == "cancel":
        loop.receive(0, CancelControl(0))
        loop.receive(0, CancelControl(9))
    elif end == "abort":
        loop.receive(0, Abort([1, 9]))
    else:
        loop.front_end_changed(0, is_connected=False)

    cancelled = {"cancel": ["slow 0"], "abort": ["slow request"]}
    expected = cancelled.get(end, ["slow 0", "slow 1", "slow request"])
    by_spec = zip(gated.started, gated.cancellations, strict=True)
    assert sorted(text for text, each in by_spec if each.is_cancelled) == expected
    gated.gate.set()
    assert all(future.exception(WAIT_S) is None for future in running)
    replies = [message.call for message in told if isinstance(message, Reply)]
    assert sorted(replies) == {"cancel": [1], "abort": [0, 1], "front end": []}[end]
    assert not loop._compiling and not loop._calls


def chain(count: int, **wrapped: str) -> str:
    """A JSON schema of `count` definitions. Each definition refers to the next, under a keyword if
    `wrapped` has one."""

    def step(place: int) -> Any:
        link: Any = {"$ref": f"#/$defs/d{place + 1}"}
        for keyword, kind in wrapped.items():
            link = {keyword: [link] if kind == "list" else {"a": link}}
        return link

    definitions = {f"d{place}": step(place) for place in range(count - 1)}
    definitions[f"d{count - 1}"] = {"type": "string"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def rules(count: int, sign: str, first: str) -> str:
    lines = [f'r{place}{sign} "a" r{place + 1}' for place in range(count)]
    return "\n".join([f"{first}{sign} r0", *lines, f'r{count}{sign} "b"'])


HOSTILE = {
    "a chain of references": ("json", chain(1000)),
    "a chain of allOf": ("json", chain(1000, allOf="list")),
    "a chain of anyOf": ("json", chain(1000, anyOf="list")),
    "a chain of properties": ("json", chain(4300, properties="object")),
    "many rules of Lark": ("grammar", rules(3000, ":", "start")),
    "many rules of EBNF": ("grammar", rules(3000, " ::=", "root")),
    "rules that nest": ("grammar", rules(900, ":", "start")),
    "many options": ("regex", "[ab]?" * 50_000),
    "options within the bounds": ("regex", "[ab]?" * 9_000),
    "counts within counts": ("regex", "((a{100}){100}){100}"),
    "a pattern in Lark": ("grammar", "start: /" + "[ab]?" * 20_000 + "/"),
    "options of rules": ("grammar", "start: " + "b? " * 19_000 + '\nb: "b"'),
    "intersections": ("grammar", "start: A\nA: " + " & ".join(f"/.*a.{{{n}}}/" for n in range(60))),
    "patterns that all hold": (
        "json",
        json.dumps(
            {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(50, 70)]}
        ),
    ),
    "a schema in Lark": ("grammar", "start: %json " + '{"anyOf":[' * 5_000 + "{}" + "]}" * 5_000),
    "a pattern of a tag": (
        "structural_tag",
        json.dumps({"format": {"type": "regex", "pattern": "[ab]?" * 40_000}}),
    ),
}


@pytest.fixture(scope="module")
def shared_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokenizer(folder)
    compiler = started(folder)
    compiler.compile(GrammarSpec("regex", "a")).result(WAIT_S)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_spec_is_refused_in_under_two_seconds_and_50_mib(
    shared_compiler: GrammarCompiler, name: str
) -> None:
    process = psutil.Process()
    before = process.memory_info().rss

    def refusal_s() -> float:
        start = time.monotonic()
        # Without the cache of `compile`: each attempt reads the spec.
        with pytest.raises((UserError, Overloaded)):
            # Overloaded on a busy machine, where the wall time ends before the CPU time.
            shared_compiler._compile_checked(GrammarSpec(*HOSTILE[name]), Cancellation())
        return time.monotonic() - start

    assert least(refusal_s, 2) < 2
    error = shared_compiler.compile(GrammarSpec(*HOSTILE[name])).exception(WAIT_S)
    assert isinstance(error, UserError | Overloaded)
    assert process.memory_info().rss - before < 50 * 2**20


def test_an_unforeseen_expensive_spec_fails_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    bounded = compiler._fork_server
    assert bounded is not None
    bounded.close()
    setup = bounded._orders.setup
    small = structs.replace(LIMITS, stack_bytes=8 * 2**20)
    compiler._fork_server = ForkServer("tests.support.unbounded_grammars", setup, small)

    crashed = compiler.compile(GrammarSpec(*HOSTILE["a chain of properties"])).exception(WAIT_S)
    others = [compiler.compile(GrammarSpec("regex", word)) for word in ("a", "b")]

    assert isinstance(crashed, UserError) and "killed by SIGSEGV" in crashed.message
    assert all(isinstance(other.result(WAIT_S), Grammar) for other in others)
    compiler.close()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_compilation_killed_or_stopped_by_another_process_fails_and_is_not_cached(
    tmp_path: Path, signal_number: int
) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    spec = GrammarSpec("regex", "[ab]?" * 8_500)
    assert compiler._fork_server is not None
    compiler.compile(GrammarSpec("regex", "a")).result(WAIT_S)
    pid = compiler._fork_server.pid
    assert pid is not None
    wait_for(lambda: not children_of(pid))

    interrupted = compiler.compile(spec)
    wait_for(lambda: children_of(pid))
    (fork,) = children_of(pid)
    # The compilation takes a second of CPU time. Wait until the fork has begun: a fork that is
    # killed earlier is replaced.
    wait_for(lambda: cpu_seconds(fork) > 0.2)
    os.kill(fork, signal_number)
    error = interrupted.exception(WAIT_S)
    again = compiler.compile(spec)

    assert isinstance(error, Overloaded) and "was interrupted" in error.message
    assert again is not interrupted
    compiler.close()


def test_compilation_continues_after_all_threads_found_a_stopped_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "STUCK_S", 1.0)
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    assert compiler._fork_server is not None
    compiler.compile(GrammarSpec("regex", "a")).result(WAIT_S)
    pid = compiler._fork_server.pid
    assert pid is not None

    os.kill(pid, signal.SIGSTOP)
    made = [compiler.compile(GrammarSpec("regex", "b" * (n + 1))) for n in range(4)]

    assert all(isinstance(future.result(WAIT_S), Grammar) for future in made)
    assert not alive(pid)
    compiler.close()


def test_a_vocabulary_that_cannot_encode_json_refuses_only_json(tmp_path: Path) -> None:
    tokens = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for digit in "0123456789":
        tokens[digit] = len(tokens)
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler()
    compiler.start(str(tmp_path), len(tokens), frozenset([EOS]))

    errors = [compiler.compile(GrammarSpec("json_object")).exception(WAIT_S) for _ in range(2)]
    number = compiler.compile(GrammarSpec("regex", "[0-9]+")).result(WAIT_S)

    assert isinstance(errors[0], UserError) and errors[0] is errors[1]
    assert "vocabulary" in errors[0].message
    assert isinstance(number, Grammar)
    compiler.close()


def test_two_slow_compilations_delay_a_third_by_at_most_their_time_limit(
    shared_compiler: GrammarCompiler,
) -> None:
    numbers = count()

    def delay_s() -> float:
        number = next(numbers)
        slow = [GrammarSpec("regex", "[ab]?" * (8_000 + 2 * number + n)) for n in range(2)]
        start = time.monotonic()
        third = GrammarSpec("regex", f"third{number}")
        made = [shared_compiler.compile(spec) for spec in [*slow, third]]
        made[2].result(WAIT_S)
        seconds = time.monotonic() - start
        errors = [slow.exception(WAIT_S) for slow in made[:2]]
        assert all(isinstance(error, UserError | Overloaded) for error in errors)
        return seconds

    limit_s = compilation.LIMITS.wall_s + 1
    assert least(delay_s, limit_s) < limit_s


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value-{n:06d}-{n * 7919 % 100003}" for n in range(9_500)]},
        {
            "$defs": {
                f"T{n}": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer"},
                        "name": {"type": "string"},
                        "next": {"anyOf": [{"$ref": f"#/$defs/T{(n * 7 + 1) % 200}"}, {}]},
                        "all": {"type": "array", "items": {"$ref": f"#/$defs/T{(n + 1) % 200}"}},
                    },
                    "required": ["id"],
                }
                for n in range(200)
            },
            "$ref": "#/$defs/T0",
        },
    ],
    ids=["an enum of 200 kB", "as large as an OpenAPI page"],
)
def test_a_large_valid_schema_is_compiled_once(
    shared_compiler: GrammarCompiler, schema: Any
) -> None:
    spec = GrammarSpec("json", json.dumps(schema))

    made = shared_compiler.compile(spec)

    assert isinstance(made.result(WAIT_S), Grammar)
    assert shared_compiler.compile(GrammarSpec("json", json.dumps(schema))) is made


def test_cached_grammars_beyond_the_memory_limit_are_evicted_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    specs = [GrammarSpec("regex", word) for word in ("one", "two", "three")]
    first, second = (compiler.compile(spec) for spec in specs[:2])
    for made in (first, second):
        # Make the grammar cost a second of matching time.
        made.result(WAIT_S).slow_s = 1.0
    monkeypatch.setattr(compilation, "MAX_CACHED_BYTES", 100 * 2**20)

    compiler.compile(specs[2]).result(WAIT_S)

    assert compiler.compile(specs[1]) is second
    assert compiler.compile(specs[0]) is not first
    compiler.close()


def test_a_grammar_whose_outputs_took_too_long_is_refused_from_then_on(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    specs = [GrammarSpec("regex", word) for word in ("a+", "b+")]
    slow, other = (compiler.compile(spec).result(WAIT_S) for spec in specs)

    slow.spend(3.0)

    for _ in range(2):
        with pytest.raises(
            UserError, match=r"the regular expression cannot be enforced: its outputs took 2.99"
        ):
            compiler.compile(specs[0]).result(WAIT_S)
    assert compiler.compile(specs[1]).result(WAIT_S) is other
    compiler.close()


def test_a_grammar_that_has_grown_too_large_is_recompiled(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    compiler = started(tmp_path)
    spec = GrammarSpec("regex", "a+")
    made = compiler.compile(spec)
    made.result(WAIT_S).slow_s = 3.0

    again = compiler.compile(spec)

    assert again is not made and again.result(WAIT_S).num_bytes < made.result().num_bytes
    compiler.close()
