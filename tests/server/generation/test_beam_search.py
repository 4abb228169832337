"""Beam search over HTTP: results, rejected requests, and no remains in the engine."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from http_rig import EOS, TalkingClient, ids, in_memory, on_port
from scripted_client import ScriptedQueue, columns
from waits import until

from engine.client.output_queue import Update
from server.generation import pipeline
from server.generation.beam_search import Beam, BeamSearch
from server.generation.logprobs import PositionLogprobs, TokenLogprob
from server.generation.outputs import Delta
from server.generation.pipeline import MAX_TOKENS_AT_ONCE, TOKENS_PER_SEQUENCE
from server.generation.sequence import Sequence

A, B, C, D = ids("abcd")
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
"""The prompt of the conversation with the message "hi"."""


class BranchingClient(TalkingClient):
    """A client whose tokens depend on the text so far. `tree` maps the tokens after the prompt to
    the possible next tokens with their log-probabilities; C follows all other texts."""

    def __init__(self, num_prompt: int, tree: dict[tuple[int, ...], dict[int, float]]) -> None:
        super().__init__()
        assert self.ready is not None
        self.ready = msgspec.structs.replace(self.ready, eos_token_ids=(EOS,))
        self._num_prompt = num_prompt
        self._tree = tree

    async def _talk(self, queue: ScriptedQueue) -> None:
        await asyncio.sleep(self.pace_s)
        if queue.key in self.aborted:
            return
        said = tuple(queue.prompt[self._num_prompt :])
        likely = self._tree.get(said, {C: -0.1})
        others = {token: -50.0 - token for token in range(60, 100) if token not in likely}
        count = queue.sampling.logprobs or 0
        top = sorted((likely | others).items(), key=lambda entry: -entry[1])[:count]
        tokens, values = [token for token, _ in top], [value for _, value in top]
        entry = ([tokens[0], *tokens], [values[0], *values], 1)
        queue.say(tokens[0], finish="length", logprobs=[columns([entry])], cached=0)


async def test_the_beams_of_many_prompts_are_converted_in_turns_with_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    num_iterations, converted = 0, list[int]()
    take = Sequence.take

    def count() -> None:
        nonlocal num_iterations
        num_iterations += 1
        if len(converted) < 16:
            loop.call_soon(count)

    def counted(self: Sequence, update: Update, elapsed_s: float) -> Delta | None:
        if len(update.tokens) == 2:
            converted.append(num_iterations)
        return take(self, update, elapsed_s)

    monkeypatch.setattr(Sequence, "take", counted)
    monkeypatch.setattr(pipeline, "MAX_ITERATION_VALUES", 2)
    count()
    async with in_memory(BranchingClient(1, {})) as rig:
        response = await rig.complete(prompt=[[A]] * 8, use_beam_search=True, n=2, max_tokens=2)

    assert [choice["index"] for choice in response.json()["choices"]] == list(range(16))
    assert len(set(converted)) == 16


TREE = {
    (): {A: -0.5, B: -1.0},
    (A,): {C: -2.0, EOS: -2.5},
    (B,): {EOS: -0.25, D: -0.5},
    (B, D): {EOS: -0.1, A: -3.0},
}


async def test_the_best_beams_are_the_choices() -> None:
    async with in_memory(BranchingClient(2, TREE)) as rig:
        response = await rig.complete(use_beam_search=True, n=2, max_tokens=3, logprobs=1)

        answer = response.json()
        # Scores: [B, end] -1.25 / 2, [B, D, end] -1.6 / 3, [A, C, C] -2.6 / 3.
        texts = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
        assert texts == [("bd", "stop"), ("b", "stop")]
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["b", "d", "</s>"]
        assert logprobs["token_logprobs"] == pytest.approx([-1.0, -0.5, -0.1])
        assert logprobs["top_logprobs"][1] == pytest.approx({"</s>": -0.25, "d": -0.5})
        assert answer["usage"]["prompt_tokens"] == 2
        assert answer["usage"]["completion_tokens"] == 5
        assert [queue.is_continuation for queue in rig.client.queues[:3]] == [False, True, True]
        assert await rig.metric("vllm:request_success_total") == 2
        assert await rig.metric("vllm:generation_tokens_total") == 5


async def test_a_length_penalty_prefers_short_beams_and_chat_supports_beams() -> None:
    async with in_memory(BranchingClient(len(ids(CHAT)), TREE)) as rig:
        fields: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 3}
        response = await rig.chat(
            length_penalty=-1, return_token_ids=True, stop_token_ids=[D], **fields
        )

        choices = response.json()["choices"]
        # Scores: [B, end] -2.5, [B, D] -3. D is a stop token: it ends the text and is not part of
        # it.
        assert [choice["message"]["content"] for choice in choices] == ["b", "b"]
        assert [choice["token_ids"] for choice in choices] == [[B, EOS], [B, D]]
        assert [choice["stop_reason"] for choice in choices] == [None, D]


async def test_each_prompt_is_searched_and_echoed() -> None:
    async with in_memory(BranchingClient(1, TREE)) as rig:
        response = await rig.complete(
            ["p", "q"], use_beam_search=True, n=2, max_tokens=None, echo=True, temperature=0
        )

        texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == ["pbd", "pb", "qbd", "qb"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True),
        ("n", 20),
        ("stop", ["x"]),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 1),
        ("logit_bias", {"5": 1}),
        ("allowed_token_ids", [5]),
        ("bad_words", ["x"]),
        ("guided_regex", "a+"),
        ("structured_outputs", {"choice": ["a"]}),
        ("length_penalty", 10.5),
        ("best_of", 3),
    ],
)
async def test_fields_that_beam_search_does_not_support_are_a_400(field: str, value: Any) -> None:
    async with in_memory() as rig:
        response = await rig.complete(use_beam_search=True, **{field: value})

        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
        assert rig.client.queues == []


async def test_beams_and_best_of_are_refused_if_logprobs_are_logits() -> None:
    async with in_memory(TalkingClient(logprobs_mode="processed_logits")) as rig:
        for fields in ({"use_beam_search": True}, {"best_of": 2}):
            error = (await rig.complete(**fields)).json()["error"]

            (name,) = fields
            assert error["param"] == name
            assert "this server reports processed_logits" in error["message"]


async def test_an_abandoned_search_stops() -> None:
    client = BranchingClient(2, {})
    client.pace_s = 0.01
    async with on_port(client) as rig:
        asked = asyncio.create_task(rig.complete(use_beam_search=True, n=2, max_tokens=2000))
        await until(lambda: len(client.queues) > 2)
        asked.cancel()
        await until(lambda: not rig.state.active_requests)
        count = len(client.queues)
        await asyncio.sleep(0.1)

        assert 2 < count == len(client.queues)
        assert set(client.aborted) <= {queue.key for queue in client.queues[-2:]}
        assert (
            await rig.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 2
        )
        assert not rig.state.active_requests


async def test_beams_of_all_searches_use_at_most_half_of_the_queue() -> None:
    client = BranchingClient(2, {})
    client.pace_s = 0.005
    fields: dict[str, Any] = {"use_beam_search": True, "max_tokens": 2000}
    async with on_port(client, max_queued_requests=12) as rig:
        wide = await rig.complete(["p", "q"], n=4, **fields)
        first = asyncio.create_task(rig.complete(["p", "q"], n=2, **fields))
        await until(lambda: bool(rig.state.active_requests))
        second = await rig.complete("p", n=3, **fields)
        other = await rig.complete("p", n=2, max_tokens=1, logprobs=1)
        first.cancel()
        await until(lambda: not rig.state.active_requests)
        third = await rig.complete("p", n=3, **{**fields, "max_tokens": 2})

    assert wide.status_code == 400
    assert "asks for 8 beams, at most 6 are" in wide.json()["error"]["message"]
    assert second.status_code == 503
    assert "4 beams are running and this request has 3" in second.json()["error"]["message"]
    assert other.status_code == third.status_code == 200


async def test_a_step_of_many_beams_lets_other_requests_run() -> None:
    num_beats = 0

    async def beat() -> None:
        nonlocal num_beats
        while True:
            num_beats += 1
            await asyncio.sleep(0)

    client = BranchingClient(2, {})
    added, most_added = 0, 0
    add = client.add

    def counted(*args: Any, **kwargs: Any) -> ScriptedQueue:
        nonlocal added, most_added, num_beats
        added = added + 1 if num_beats == 0 else 1
        most_added, num_beats = max(most_added, added), 0
        return add(*args, **kwargs)

    client.add = counted  # type: ignore[method-assign]
    async with in_memory(client) as rig:
        beating = asyncio.create_task(beat())
        answer = await rig.complete(["p"] * 20, use_beam_search=True, n=10, max_tokens=3)
        beating.cancel()

    assert answer.status_code == 200, answer.text
    assert len(client.queues) == 20 + 2 * 200
    assert most_added <= MAX_TOKENS_AT_ONCE // TOKENS_PER_SEQUENCE + 1


def test_a_search_ends_when_no_running_beam_can_beat_the_finished_beams() -> None:
    def what(**values: float) -> PositionLogprobs:
        tokens = {"end": 0, "x": 1, "y": 2}
        top = [TokenLogprob(tokens[n], n, b"", v, r) for r, (n, v) in enumerate(values.items(), 1)]
        return PositionLogprobs(top[0], tuple(top))

    search = BeamSearch(1, 9, frozenset({0}), 1.0)
    search.step([what(x=-1.0, end=-1.5, y=-9.0)])
    # The end token was only the second candidate, so the beam does not finish, whatever its score.
    assert (search.running[0].tokens, search.finished) == ([1], [])
    search.step([what(end=-0.5, x=-3.0, y=-4.0)])

    assert search.running == [] and search.finished[0].tokens == [1, 0]
    assert search.finished[0].score(1.0) == -0.75


def test_a_step_of_long_beams_is_short_and_keeps_only_requested_logprobs() -> None:
    width, num_tokens = 10, 100_000
    ends = frozenset(range(10))
    top = tuple(TokenLogprob(t, "", b"", -1.0 - t, t) for t in range(20, 20 + width + len(ends)))
    position = PositionLogprobs(top[0], top)
    data = b"\1\0\0\0" * num_tokens
    plain = BeamSearch(width, 2 * num_tokens, ends, 1.0)
    kept = BeamSearch(width, 2 * num_tokens, ends, 1.0, num_kept=2)
    for search in (plain, kept):
        search.running = [Beam(data, (), -float(index)) for index in range(width)]

    start = time.thread_time()
    plain.step([position] * width)
    seconds = time.thread_time() - start
    kept.step([position] * width)

    # The server copied the lists of 110 beams in 0.2 s, and dropped 100 of the beams at once.
    assert seconds < 0.1
    assert len(plain.running) == width and plain.running[0].num_tokens == num_tokens + 1
    assert plain.running[0].positions == []
    assert [len(entry.top) for entry in kept.running[0].positions] == [2]
    assert kept.running[0].tokens[-1] == kept.running[0].positions[0].chosen.token_id == 20


def test_a_beam_of_many_tokens_is_freed_without_recursion() -> None:
    token = TokenLogprob(7, "", b"", 0.0, 1)
    search = BeamSearch(1, 200_000, frozenset(), 1.0, num_kept=0)
    for _ in range(100_000):
        search.step([PositionLogprobs(token, (token,))])
        search.running = [replace(search.running[0], token_bytes=b"\7\0\0\0")]

    assert len(search.running[0].positions) == 100_000
    search.running.clear()
