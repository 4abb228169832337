"""The generation pipeline with a scripted engine: checks, deltas, and aborts."""

import asyncio
import itertools
import time
from typing import Any

import pytest
import text_folders
from hypothesis import given
from hypothesis import strategies as st
from scripted_client import ScriptedClient, columns, ready
from waits import WAIT_S

from config.errors import EngineDied, Overloaded, PromptTooLong, RequestFailed, UserError
from config.params.sampling import SamplingParams
from config.server import ServerConfig
from engine.client.output_queue import UNREAD_TOKEN_BYTES
from engine.client.request_limits import RequestTerms
from server.generation import pipeline
from server.generation.outputs import Delta, Prompt, Timing
from server.generation.pipeline import (
    MAX_INSTANT_CHOICES,
    MAX_TOKENS_AT_ONCE,
    Generation,
    Pauses,
    Pipeline,
    choice_seed,
)
from server.http.pacing import LoopPacer
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TextFiles

TOKENIZER = Tokenizer(TextFiles(text_folders.byte_level(), {}, None))
EOS = TOKENIZER.encode_now("</s>", False)[0]
TURNS = 1_000
"""Enough iterations of the event loop for any test."""
HI = Prompt(TOKENIZER.encode_now("hi", False), "hi")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_now(text, False)


def make(client: ScriptedClient, tokenizer: Tokenizer | None = TOKENIZER) -> Pipeline:
    return Pipeline(client, tokenizer, ServerConfig())


async def start(
    client: ScriptedClient, prompts: list[Prompt] | None = None, **params: Any
) -> Generation:
    return await make(client).start(prompts or [HI], SamplingParams(**params))


async def read(generation: Generation) -> list[Delta]:
    return [delta for deltas in [d async for d in generation] for delta in deltas]


async def test_text_is_sent_as_deltas_and_the_last_delta_has_the_finish_reason() -> None:
    client = ScriptedClient(ready())
    generation = await start(client)
    client.queues[0].say(*ids("he"), cached=1)

    first = await anext(generation)
    client.queues[0].say(*ids("llo"), EOS, finish="stop")
    second = await anext(generation)
    rest = await read(generation)

    assert first == [Delta(0, "he", ids("he"))]
    assert second == [Delta(0, "llo", [*ids("llo"), EOS], finish_reason="stop")]
    assert rest == []
    assert (generation.num_prompt_tokens, generation.num_cached_tokens) == (len(HI.token_ids), 1)
    assert generation.num_output_tokens == len([*ids("he"), *ids("llo"), EOS])
    assert generation.timing == Timing(0.25, 0.5, 1.0)
    assert client.aborted == []


async def test_an_incomplete_character_is_held_back_until_it_is_complete() -> None:
    client = ScriptedClient(ready())
    generation = await start(client)
    *most, last = ids("🙂")
    client.queues[0].say(*most)

    first = await anext(generation)
    client.queues[0].say(last, finish="length")
    second = await anext(generation)

    assert first == [Delta(0, "", most)]
    assert second == [Delta(0, "🙂", [last], finish_reason="length")]


async def test_a_stop_string_cuts_the_text_and_aborts_in_the_engine() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, stop=("END",), logprobs=0)
    tokens = ids("ok E")
    entries = [columns([([token], [-1.0], 1)]) for token in [*tokens, *ids("ND more")]]
    client.queues[0].say(*tokens, logprobs=entries[: len(tokens)])

    first = await anext(generation)
    client.queues[0].say(*ids("ND more"), logprobs=entries[len(tokens) :])
    (second,) = await anext(generation)
    rest = await read(generation)

    assert first[0].text == "ok "
    assert (second.text, second.finish_reason, second.stop_reason) == ("", "stop", "END")
    assert second.token_ids == ids("ND")
    assert second.logprobs is not None and len(second.logprobs) == len(second.token_ids)
    assert generation.num_output_tokens == len(tokens) + len(ids("ND"))
    assert rest == [] and client.aborted == [client.queues[0].key]


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, stop=("END",))
    client.queues[0].say(*ids("the EN"), finish="length")

    (output,) = await generation.collect()

    assert (output.text, output.finish_reason, output.stop_reason) == ("the EN", "length", None)


async def test_the_stop_string_may_be_included_in_the_text() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, stop=("END",), include_stop_str_in_output=True)
    client.queues[0].say(*ids("an END here"))

    (output,) = await generation.collect()

    assert (output.text, output.stop_reason) == ("an END", "END")


async def test_stop_strings_before_min_tokens_are_ignored() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, stop=("x",), min_tokens=4, max_tokens=9)
    client.queues[0].say(*ids("axb"))
    client.queues[0].say(*ids("xyz"))

    (output,) = await generation.collect()

    assert (output.text, output.token_ids) == ("axb", ids("axbx"))


async def test_a_stop_token_is_not_part_of_the_text() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, stop_token_ids=(ids("!")[0],))
    client.queues[0].say(*ids("yes!"), finish="stop", stop_token=ids("!")[0])

    (output,) = await generation.collect()

    assert (output.text, output.stop_reason) == ("yes", ids("!")[0])
    assert output.token_ids == ids("yes!")


@given(text=st.text("abE ND🙂", max_size=12), cuts=st.lists(st.integers(1, 4), max_size=12))
def test_joined_deltas_equal_the_decoded_text_cut_at_the_first_stop_string(
    text: str, cuts: list[int]
) -> None:
    async def run() -> str:
        client = ScriptedClient(ready())
        generation = await start(client, stop=("END", "b b"), max_tokens=90)
        left = ids(text)
        for cut in cuts:
            client.queues[0].say(*left[:cut])
            left = left[cut:]
        client.queues[0].say(*left, finish="length")
        return "".join([delta.text for delta in await read(generation)])

    found = [place for stop in ("END", "b b") if (place := text.find(stop)) >= 0]

    joined = asyncio.run(run())

    assert joined == text[: min(found, default=len(text))]


async def test_choices_of_all_prompts_are_merged_with_one_delta_each() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, [HI, Prompt(ids("yo"))], n=2, seed=5)
    waiting = asyncio.ensure_future(anext(generation))
    await asyncio.sleep(0)
    for queue, letter in zip(client.queues, "abcd", strict=True):
        queue.say(*ids(letter), cached=1)

    together = await waiting
    client.queues[2].say(*ids("x"))
    single = await anext(generation)
    for queue, letter in zip(client.queues, "wxyz", strict=True):
        queue.say(*ids(letter), finish="length")
    outputs = await generation.collect()

    assert [(delta.index, delta.text) for delta in together] == list(enumerate("abcd"))
    assert single == [Delta(2, "x", ids("x"))]
    assert [output.text for output in outputs] == list("wxyz")
    assert [bytes(queue.prompt) for queue in client.queues[::2]] == [
        bytes(HI.token_ids),
        bytes(ids("yo")),
    ]
    assert [queue.sampling.seed for queue in client.queues] == [5, choice_seed(5, 1)] * 2
    assert {queue.sampling.n for queue in client.queues} == {1}
    assert (generation.num_prompt_tokens, generation.num_cached_tokens) == (4, 2)


def test_each_choice_has_its_own_seed_in_64_bits() -> None:
    seeds = {choice_seed(seed, choice) for seed in (0, 1, -(2**63)) for choice in range(128)}

    assert len(seeds) == 3 * 128
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(None, 3) is None and choice_seed(9, 0) == 9


async def test_logprobs_have_texts_bytes_and_ranks() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, logprobs=2)
    half, other = ids("🙂")[0], ids("a")[0]
    entry = columns([([half, other, half], [-2.5, -0.5, float("-inf")], 7)])
    client.queues[0].say(half, logprobs=[entry], finish="length")

    (output,) = await generation.collect()

    assert output.logprobs is not None
    (position,) = output.logprobs
    assert (position.chosen.token_id, position.chosen.rank) == (half, 7)
    assert (position.chosen.bytes, position.chosen.token) == (b"\xf0\x9f", "\ufffd")
    assert [(e.token_id, e.logprob, e.rank) for e in position.top] == [
        (other, -0.5, 1),
        (half, -9999.0, 2),
    ]
    assert output.cumulative_logprob == -2.5


async def test_only_the_first_choice_requests_prompt_logprobs_which_begin_with_none() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, prompt_logprobs=0, n=2, max_tokens=1)
    entry = columns([([HI.token_ids[1]], [-1.5], 3)])
    client.queues[0].say(*ids("a"), prompt_logprobs=[entry], finish="length")
    client.queues[1].say(*ids("b"), finish="length")

    await generation.collect()

    (logprobs,) = generation.prompt_logprobs
    first, second = logprobs or ()
    assert first is None
    assert second is not None and second.chosen.logprob == -1.5
    assert [queue.sampling.prompt_logprobs for queue in client.queues] == [0, None]


async def test_max_tokens_0_needs_no_engine() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, max_tokens=0, n=2)

    outputs = await generation.collect()

    assert [(o.text, o.token_ids, o.finish_reason) for o in outputs] == [("", [], "length")] * 2
    assert client.queues == [] and generation.num_output_tokens == 0


async def test_few_choices_without_output_are_returned_per_iteration_of_the_loop() -> None:
    pipeline = make(ScriptedClient(ready()))
    params = SamplingParams(max_tokens=0)
    generations = [await pipeline.start([HI] * 200, params) for _ in range(2)]
    steps = list[int]()
    readers = [asyncio.create_task(read(generation)) for generation in generations]

    while not all(reader.done() for reader in readers):
        before = num_finished(generations)
        await asyncio.sleep(0)
        steps.append(num_finished(generations) - before)

    for reader in readers:
        assert [delta.index for delta in reader.result()] == [*range(200)]
    assert max(steps) == MAX_INSTANT_CHOICES


def num_finished(generations: list[Generation]) -> int:
    return sum(s.is_finished for generation in generations for s in generation._sequences)


async def test_abort_ends_the_iteration_of_choices_without_output() -> None:
    generation = await start(ScriptedClient(ready()), [HI] * 200, max_tokens=0)

    first = await anext(generation)
    generation.abort()

    assert len(first) == MAX_INSTANT_CHOICES
    assert await read(generation) == []


async def test_prompt_logprobs_with_max_tokens_0_generate_no_token() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, max_tokens=0, prompt_logprobs=0)
    entry = columns([([HI.token_ids[1]], [-1.5], 1)])
    client.queues[0].say(prompt_logprobs=[entry])
    client.queues[0].say(finish="length")

    (output,) = await generation.collect()

    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert generation.num_output_tokens == 0 and client.queues[0].sampling.max_tokens == 0
    assert len(generation.prompt_logprobs[0] or ()) == 2
    assert generation.timing == Timing(0.25, 0.5, 1.0)


async def test_without_a_tokenizer_there_are_ids_but_no_text() -> None:
    client = ScriptedClient(ready())
    generation = await make(client, None).start([HI], SamplingParams(logprobs=0))
    client.queues[0].say(5, logprobs=[columns([([5], [-1.0], 1)])], finish="length")

    (output,) = await generation.collect()

    assert (output.text, output.token_ids) == ("", [5])
    assert output.logprobs is not None and output.logprobs[0].chosen.bytes == b""


async def test_omitted_max_tokens_is_the_rest_of_the_context() -> None:
    client = ScriptedClient(ready(max_model_len=20))

    await start(client, [Prompt([1] * 7)], max_tokens=None)

    assert client.queues[0].sampling.max_tokens == 13


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers", "param"),
    [
        # The prompt without the output would fit.
        (15, 6, "20 tokens.*21 tokens", "max_tokens"),
        (20, None, "20 tokens.*20 tokens", "prompt"),
        (21, 0, "20.*21", "prompt"),
    ],
)
async def test_requests_beyond_the_context_are_refused_with_both_numbers(
    length: int, max_tokens: int | None, numbers: str, param: str
) -> None:
    client = ScriptedClient(ready(max_model_len=20))

    with pytest.raises(PromptTooLong, match=numbers) as caught:
        await make(client).start(
            [HI, Prompt([1] * length)], SamplingParams(max_tokens=max_tokens), param="prompt"
        )

    assert caught.value.param == param
    assert client.queues == []


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {1000: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (3, 1000)}, "allowed_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"bad_words": ("  ",)}, "bad_words"),
        ({"bad_words": ("x" * 3000, "y" * 3000)}, "bad_words"),
        ({"bad_words": ("xyz!" * 70,)}, "bad_words"),
        ({"bad_words": tuple(f"w{n}" for n in range(513))}, "bad_words"),
        ({"allowed_token_ids": (3,), "bad_words_token_ids": ((3,),)}, "allowed_token_ids"),
        (
            {"allowed_token_ids": (0, 3), "min_tokens": 1, "stop_token_ids": [3]},
            "allowed_token_ids",
        ),
        ({"stop": ("x",), "detokenize": False}, "stop"),
    ],
)
async def test_token_ids_outside_the_vocabulary_and_invalid_bad_words_are_refused(
    params: dict[str, Any], param: str
) -> None:
    client = ScriptedClient(ready(vocab_size=1000))

    with pytest.raises(UserError) as caught:
        await start(client, **params)

    assert caught.value.param == param and client.queues == []


@pytest.mark.parametrize("tokens", [[], [1, 1000], [-1, 2]])
async def test_empty_prompts_and_prompts_with_unknown_ids_are_refused(tokens: list[int]) -> None:
    client = ScriptedClient(ready(vocab_size=1000))

    with pytest.raises(UserError):
        await start(client, [HI, Prompt(tokens)])

    assert client.queues == []


async def test_choices_share_the_lists_of_their_request() -> None:
    client = ScriptedClient(ready())
    params = SamplingParams(n=2, seed=1, logit_bias={5: 1.0}, allowed_token_ids=(5, 6))

    await make(client).start([HI, HI], params)

    sent = [queue.sampling for queue in client.queues]
    assert len(sent) == 4
    assert all(choice.logit_bias is params.logit_bias for choice in sent)
    assert all(choice.allowed_token_ids is params.allowed_token_ids for choice in sent)


async def test_bad_words_are_sent_as_ids_with_and_without_a_space() -> None:
    client = ScriptedClient(ready())

    await start(client, bad_words=("the",), stop=("x",))

    sampling = client.queues[0].sampling
    assert sampling.bad_words_token_ids == (tuple(ids("the")), tuple(ids(" the")))
    assert sampling.bad_words == () and sampling.stop == ()


async def test_a_refused_choice_aborts_the_other_choices() -> None:
    client = ScriptedClient(ready(), room=2)

    with pytest.raises(Overloaded):
        await start(client, n=3)

    assert client.aborted == [queue.key for queue in client.queues]


async def test_other_requests_continue_while_a_large_request_is_started() -> None:
    client = ScriptedClient(ready())
    num_prompts, length = 40, 60
    prompts = [Prompt([1] * length)] * num_prompts
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(len(client.queues))
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    await start(client, prompts, n=16, max_tokens=1)
    counter.cancel()

    # Sequences sent between two pauses.
    gaps = [after - before for before, after in itertools.pairwise(turns)]
    assert len(client.queues) == num_prompts * 16
    assert max(gaps) <= pipeline.MAX_TOKENS_AT_ONCE // pipeline.TOKENS_PER_SEQUENCE


async def test_a_disconnect_while_a_request_is_started_leaks_nothing() -> None:
    client = ScriptedClient(ready())
    task = asyncio.create_task(start(client, [HI] * 8, n=100, max_tokens=1))
    # The check and the start each yield once before the first sequence.
    for _ in range(4):
        await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < len(client.queues) < 800
    assert len(client.aborted) == len(client.queues)


async def test_a_starting_or_dead_engine_refuses_requests() -> None:
    client = ScriptedClient(None)

    with pytest.raises(Overloaded):
        await start(client)
    client.failure = "killed by signal 9"
    with pytest.raises(EngineDied, match="signal 9"):
        await start(client)


async def test_a_dead_engine_fails_every_choice() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, n=3)
    for queue in client.queues:
        queue.die("killed by signal 9")

    with pytest.raises(EngineDied, match="signal 9"):
        await generation.collect()


async def test_a_failed_choice_fails_the_other_choices_of_its_request() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, n=2)
    client.queues[1].say(finish="error", error="logits are not numbers")

    with pytest.raises(RequestFailed, match="not numbers"):
        await generation.collect()

    assert client.aborted == [client.queues[0].key]


@pytest.mark.parametrize("choices", [1, 3])
async def test_abort_ends_a_waiting_reader_and_may_be_repeated(choices: int) -> None:
    client = ScriptedClient(ready())
    generation = await start(client, n=choices)
    reader = asyncio.create_task(generation.collect())
    await asyncio.sleep(0)

    generation.abort()
    generation.abort()
    outputs = await asyncio.wait_for(reader, WAIT_S)

    assert [output.finish_reason for output in outputs] == [None] * choices
    assert client.aborted == [queue.key for queue in client.queues]


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_reader_that_is_cancelled_aborts_its_request(choices: int) -> None:
    client = ScriptedClient(ready())
    generation = await start(client, n=choices)
    reader = asyncio.create_task(generation.collect())
    await asyncio.sleep(0)

    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader

    assert client.aborted == [queue.key for queue in client.queues]
    assert len(asyncio.all_tasks()) == 1


async def test_priority_and_salt_reach_the_engine() -> None:
    client = ScriptedClient(ready())

    await make(client).start([HI], SamplingParams(), RequestTerms(-3, "mine"))

    assert (client.queues[0].priority, client.queues[0].cache_salt) == (-3, "mine")


async def test_updates_of_many_choices_are_read_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_UPDATE_VALUES", 10)
    client = ScriptedClient(ready())
    generation = await start(client, n=8, max_tokens=20)
    for queue in client.queues:
        queue.say(*ids("aaaaa"), finish="length")

    parts = [len(deltas) async for deltas in generation]

    assert sum(parts) == 8
    assert max(parts) == 3


async def test_other_tasks_run_between_the_parts_of_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "MAX_UPDATE_VALUES", 1)
    client = ScriptedClient(ready())
    generation = await start(client, n=8, max_tokens=20)
    for queue in client.queues:
        queue.say(*ids("aa"), finish="length")
    await anext(generation)
    calls: list[int] = []
    asyncio.get_running_loop().call_soon(calls.append, 1)

    await anext(generation)

    assert calls == [1]


async def test_output_that_was_fetched_for_a_slow_reader_counts_as_unread() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, n=3, max_tokens=20)
    client.queues[0].say(*ids("a"))
    await anext(generation)
    before = generation.num_unread_bytes

    for queue in client.queues[1:]:
        queue.say(*ids("aaaa"))
    for _ in range(5):
        await asyncio.sleep(0)

    fetched = generation.num_unread_bytes
    await anext(generation)
    assert before == generation.num_unread_bytes == 0
    assert fetched == 8 * UNREAD_TOKEN_BYTES


async def test_output_of_many_requests_is_paced_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "MAX_ITERATION_VALUES", 10)
    client = ScriptedClient(ready())
    shared = make(client)
    generations = [await shared.start([HI], SamplingParams(max_tokens=20)) for _ in range(20)]
    for queue in client.queues:
        queue.say(*ids("aaaaa"), finish="length")
    num_read, steps = 0, []

    async def read_all(generation: Generation) -> None:
        nonlocal num_read
        async for _ in generation:
            num_read += 1

    readers = [asyncio.create_task(read_all(generation)) for generation in generations]
    while not all(reader.done() for reader in readers):
        before = num_read
        await asyncio.sleep(0)
        steps.append(num_read - before)

    assert num_read == 20
    assert max(steps) == 2


async def test_long_work_of_many_requests_is_paced_together() -> None:
    pacer = LoopPacer(1)
    num_pieces = most_at_once = 0

    async def beat() -> None:
        nonlocal num_pieces, most_at_once
        while True:
            most_at_once, num_pieces = max(most_at_once, num_pieces), 0
            await asyncio.sleep(0)

    async def work() -> None:
        nonlocal num_pieces
        pauses = Pauses(pacer)
        for _ in range(5):
            await pauses.after(MAX_TOKENS_AT_ONCE + 1)
            num_pieces += 1

    beating = asyncio.create_task(beat())
    await asyncio.gather(*(work() for _ in range(50)))
    beating.cancel()

    assert 1 <= most_at_once <= 2


async def test_token_counts_of_many_choices_are_read_as_fast_as_those_of_a_single_choice() -> None:
    """A stream may report them in every chunk of every choice."""

    def reading_s(generation: Generation) -> float:
        begun_s = time.process_time()
        for _ in range(2_000):
            _counts(generation)
        return time.process_time() - begun_s

    single, many = (
        await start(ScriptedClient(ready())),
        await start(ScriptedClient(ready()), [HI] * 500, n=2),
    )

    assert min(reading_s(many) / reading_s(single) for _ in range(5)) < 4


async def test_token_counts_are_the_sums_over_all_choices() -> None:
    client = ScriptedClient(ready())
    generation = await start(client, [HI, Prompt(ids("hello"))], n=2)
    for number, queue in enumerate(client.queues, 1):
        queue.say(*ids("abcd"[:number]), cached=number)
        queue.say(*ids("e"), finish="length")

    await read(generation)

    assert _counts(generation) == (len(ids("hihello")), 1 + 3, 1 + 2 + 3 + 4 + 4)


def _counts(generation: Generation) -> tuple[int, int, int]:
    return (
        generation.num_prompt_tokens,
        generation.num_cached_tokens,
        generation.num_output_tokens,
    )
