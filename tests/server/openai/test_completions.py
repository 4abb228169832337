"""POST /v1/completions: prompt forms, echo, and the completions logprobs format."""

from typing import Any

import pytest
from http_rig import EOS, TOKENIZER, TalkingClient, events, ids, in_memory
from scripted_client import ScriptedQueue, columns

from server.generation.logprobs import PositionLogprobs, TokenLogprob
from server.serving import job
from server.serving.choices import TextLogprobs, token_formatter


async def test_an_answer_has_every_documented_key() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        answer = (await rig.complete(max_tokens=99)).json()

        assert answer.pop("id").startswith("cmpl-") and answer.pop("created")
        assert answer == {
            "object": "text_completion",
            "model": "demo",
            "choices": [
                {
                    "index": 0,
                    "text": "abc",
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "prompt_logprobs": None,
                    "token_ids": None,
                    "prompt_token_ids": None,
                }
            ],
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 4,
                "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "service_tier": None,
            "system_fingerprint": rig.state.fingerprint,
            "kv_transfer_params": None,
        }


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("hi", [ids("hi")]),
        (["a", "bc"], [ids("a"), ids("bc")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ([""] * 0 + ["x"], [ids("x")]),
    ],
)
async def test_every_form_of_prompt_reaches_the_engine(prompt: object, wanted: object) -> None:
    async with in_memory() as rig:
        answer = (await rig.complete(prompt)).json()

        assert [queue.prompt for queue in rig.client.queues] == wanted
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(wanted)))  # type: ignore[arg-type]  # a list


async def test_choices_follow_their_prompts_in_order() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        answer = (await rig.complete(["p", "q"], n=2, best_of=2, echo=True)).json()

        texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
        assert texts == [(0, "pabc"), (1, "pabc"), (2, "qabc"), (3, "qabc")]
        assert answer["usage"]["prompt_tokens"] == 2
        assert answer["usage"]["completion_tokens"] == 16


async def test_max_tokens_is_16_unless_given() -> None:
    async with in_memory(TalkingClient("x" * 50)) as rig:
        default, null = await rig.complete(), await rig.complete(max_tokens=None)

        for response in (default, null):
            assert response.json()["usage"]["completion_tokens"] == 16
            assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_max_tokens_0_generates_no_token(stream: bool) -> None:
    async with in_memory() as rig:
        response = await rig.complete(
            "Hello", echo=True, max_tokens=0, stream=stream, logprobs=1, return_token_ids=True
        )

        answer = events(response.content)[0] if stream else response.json()
        choice = answer["choices"][0]
        assert choice["text"] == "Hello" and choice["finish_reason"] == "length"
        assert choice["prompt_token_ids"] == ids("Hello") and choice["token_ids"] == []
        assert choice["logprobs"]["token_logprobs"] == [None] + [-1.0] * (len(ids("Hello")) - 1)
        if not stream:
            assert answer["usage"]["completion_tokens"] == 0
        assert await rig.metric("vllm:generation_tokens_total") == 0


async def test_logprobs_have_the_form_that_evaluation_harnesses_read() -> None:
    async with in_memory(TalkingClient("ab")) as rig:
        choice = (await rig.complete("hé", echo=True, logprobs=2)).json()["choices"][0]

        made = choice["logprobs"]
        assert choice["text"] == "héab"
        assert made["tokens"] == ["h", "é", "a", "b", "</s>"]
        assert made["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]
        assert made["top_logprobs"][0] is None
        assert made["top_logprobs"][2]["a"] == -1.0
        assert len(made["top_logprobs"][2]) in (2, 3)
        assert made["text_offset"] == [0, 1, 2, 3, 4]


async def test_the_sampled_token_is_in_top_logprobs_even_with_logprobs_0() -> None:
    async with in_memory(TalkingClient("ab")) as rig:
        made = (await rig.complete(logprobs=0)).json()["choices"][0]["logprobs"]

        assert made["top_logprobs"][0] == {"a": -1.0}
        assert made["text_offset"][:2] == [0, 1]


async def test_offsets_count_characters_when_tokens_split_them() -> None:
    halves = ids("a😀b")
    assert len(halves) > 3
    async with in_memory(TalkingClient("a😀b")) as rig:
        made = (await rig.complete(logprobs=0)).json()["choices"][0]["logprobs"]

        assert made["text_offset"] == [0, *[1] * (len(halves) - 2), 2, 3]


async def test_offsets_in_an_echo_refer_to_the_sent_text() -> None:
    async with in_memory(TalkingClient("ab")) as rig:
        fields = {"echo": True, "logprobs": 0}
        sent = (await rig.complete("x</s>y", **fields)).json()["choices"][0]
        told = (await rig.complete(ids("x</s>y"), **fields)).json()["choices"][0]

        assert sent["text"] == "x</s>yab"
        assert sent["logprobs"]["text_offset"] == [0, 1, 5, 6, 7, 8]
        assert told["text"] == sent["text"]
        assert told["logprobs"]["text_offset"] == sent["logprobs"]["text_offset"]


def test_a_leading_space_added_by_the_tokenizer_does_not_shift_offsets() -> None:
    def token(text: str) -> TokenLogprob:
        return TokenLogprob(1, text, text.encode(), -1.0, 1)

    writer = TextLogprobs(token_formatter(as_ids=False))
    rest = [PositionLogprobs(token(text), ()) for text in (" b", "c")]

    made = writer.write_prompt(1, b" a", [None, *rest], 0, "a bc")

    assert made["text_offset"] == [0, 1, 3]
    assert writer.write([PositionLogprobs(token("d"), ())])["text_offset"] == [4]


async def test_streamed_logprobs_joined_equal_the_whole_logprobs() -> None:
    async with in_memory(TalkingClient("a😀b", pace_s=0.001)) as rig:
        fields = {"echo": True, "logprobs": 1}
        whole = (await rig.complete("xy", **fields)).json()["choices"][0]["logprobs"]
        chunks = events((await rig.complete("xy", **fields, stream=True)).content)

        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        for key, value in whole.items():
            assert [entry for part in parts for entry in part[key]] == value


async def test_prompt_logprobs_belong_to_their_choice() -> None:
    async with in_memory() as rig:
        answer = (await rig.complete(["ab", "cde"], prompt_logprobs=0)).json()

        lengths = [len(choice["prompt_logprobs"]) for choice in answer["choices"]]
        assert lengths == [2, 3]
        assert answer["choices"][1]["prompt_logprobs"][0] is None


@pytest.mark.parametrize(
    ("fields", "num_lists"),
    [
        ({"n": 4, "prompt_logprobs": 1}, 4),
        ({"n": 4, "echo": True, "logprobs": 1}, 4),
        ({"n": 4, "echo": True, "logprobs": 1, "prompt_logprobs": 1}, 8),
        ({"n": 2, "best_of": 4, "prompt_logprobs": 1}, 2),
        ({"prompt_logprobs": 1}, 1),
    ],
)
async def test_prompt_logprobs_are_limited_in_all_choices_together(
    fields: dict[str, Any], num_lists: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, count = "abcde", 2 * 5 * num_lists
    async with in_memory() as rig:
        monkeypatch.setattr(job, "MAX_PROMPT_LOGPROBS", count)
        given = await rig.complete(prompt, **fields)
        monkeypatch.setattr(job, "MAX_PROMPT_LOGPROBS", count - 1)
        refused = await rig.complete(prompt, **fields)

        assert given.status_code == 200 and refused.status_code == 400
        error = refused.json()["error"]
        assert f"{count} in total, at most {count - 1} are allowed" in error["message"]
        assert error["param"] in ("logprobs", "prompt_logprobs")


async def test_logprobs_of_output_tokens_are_limited_unless_they_are_streamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "MAX_KEPT_LOGPROBS", 2 * 3 * 10 - 1)
    async with in_memory(TalkingClient("x" * 50)) as rig:
        given = await rig.complete(n=2, max_tokens=9, logprobs=2)
        refused = await rig.complete(n=2, max_tokens=10, logprobs=2)
        streamed = await rig.complete(n=2, max_tokens=10, logprobs=2, stream=True)

        assert given.status_code == 200 and refused.status_code == 400
        assert "at most 59 are allowed" in refused.json()["error"]["message"]
        assert b"at most" not in streamed.content and b"[DONE]" in streamed.content


async def test_token_ids_are_echoed_as_their_text() -> None:
    async with in_memory(TalkingClient("!")) as rig:
        choice = (await rig.complete(ids("Hello"), echo=True)).json()["choices"][0]
        half = (await rig.complete(ids("😀")[:2], stream=True)).content

        assert choice["text"] == "Hello!"
        said = "".join(event["choices"][0]["text"] for event in events(half))
        assert said == "!"


async def test_a_server_without_a_tokenizer_accepts_and_returns_ids() -> None:
    async with in_memory(tokenizer=None, skip_tokenizer_init=True) as rig:
        answer = await rig.complete([1, 2], return_token_ids=True, logprobs=1)
        text = await rig.complete("hi")

        choice = answer.json()["choices"][0]
        assert choice["token_ids"][-1] == EOS and choice["text"] == ""
        assert choice["logprobs"]["tokens"][0].startswith("token_id:")
        assert text.status_code == 400


async def test_the_end_token_is_not_part_of_the_text() -> None:
    async with in_memory(TalkingClient("x")) as rig:
        hidden = (await rig.complete()).json()["choices"][0]["text"]

        assert hidden == "x"
        assert TOKENIZER.token(EOS) == "</s>"


class UnevenClient(TalkingClient):
    """Gives every second sequence less likely tokens."""

    async def _talk(self, queue: ScriptedQueue) -> None:
        is_odd = self.queues.index(queue) % 2
        tokens, value = (ids("good"), -1.0) if is_odd == 0 else (ids("badbad!!"), -1.5)
        count = queue.sampling.logprobs
        rows = [([token] * (1 + (count or 0)), [value] * (1 + (count or 0)), 1) for token in tokens]
        queue.say(*tokens, finish="length", logprobs=None if count is None else [columns(rows)])


async def test_best_of_returns_the_most_likely_samples_and_counts_tokens_of_all_samples() -> None:
    async with in_memory(UnevenClient()) as rig:
        answer = (await rig.complete(["p", "q"], n=2, best_of=4, echo=True, max_tokens=9)).json()

        found = [(item["index"], item["text"], item["logprobs"]) for item in answer["choices"]]
        texts = ["pgood", "pgood", "qgood", "qgood"]
        assert found == [(index, text, None) for index, text in enumerate(texts)]
        assert answer["usage"]["completion_tokens"] == 2 * (2 * 4 + 2 * 8)
        assert len(rig.client.queues) == 8

        adapted = (await rig.complete("p", best_of=2, logprobs=0)).json()["choices"]
        assert [choice["logprobs"]["token_logprobs"] for choice in adapted] == [[-1.0] * 4]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2, it must be between 3 (n) and 128"),
        ({"best_of": 2, "stream": True}, "with stream it must be n, which is 1"),
        ({"best_of": 2, "use_beam_search": True}, "with use_beam_search it must be n, which is 1"),
    ],
)
async def test_best_of_is_bounded_and_must_equal_n_for_streams(
    fields: dict[str, object], words: str
) -> None:
    async with in_memory() as rig:
        response = await rig.complete(**fields)

        assert response.status_code == 400
        assert response.json()["error"]["param"] == "best_of"
        assert words in response.json()["error"]["message"]
        assert (await rig.complete(n=2, best_of=2, stream=True)).status_code == 200


async def test_a_flag_limits_the_number_of_stop_strings() -> None:
    async with in_memory(TalkingClient("abc"), max_stop_strings=5) as rig:
        answer = (await rig.complete(stop=["v", "w", "x", "y", "c"])).json()
        refused = await rig.complete(stop=["v", "w", "x", "y", "z", "c"])

        assert answer["choices"][0]["text"] == "ab"
        assert refused.json()["error"]["message"] == "stop has 6 strings, at most 5 are allowed"


async def test_a_flag_limits_the_number_of_logprobs() -> None:
    async with in_memory(max_logprobs=3) as rig:
        given = await rig.complete(logprobs=3)
        refused = await rig.complete(logprobs=4)
        of_prompt = await rig.complete(prompt_logprobs=4)

        assert given.status_code == 200
        assert refused.status_code == of_prompt.status_code == 400
        assert refused.json()["error"]["message"] == (
            "logprobs is 4, it must be at most 3 (--max-logprobs)"
        )


async def test_max_new_tokens_of_the_generation_config_limits_every_request() -> None:
    limited = '{"max_new_tokens": 5}'
    async with in_memory(override_generation_config=limited) as rig:
        answers = [
            await rig.complete(),
            await rig.complete(max_tokens=9),
            await rig.complete(max_tokens=2),
            await rig.chat("hi"),
            await rig.chat("hi", max_completion_tokens=9),
        ]
        refused = await rig.complete(min_tokens=6, max_tokens=9)

        assert [answer.status_code for answer in answers] == [200] * 5
        assert [queue.sampling.max_tokens for queue in rig.client.queues] == [5, 5, 2, 5, 5]
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "min_tokens"


async def test_a_flag_overrides_the_sampling_defaults_of_the_model() -> None:
    async with in_memory(override_generation_config='{"temperature": 0.5, "top_k": 3}') as rig:
        await rig.complete()
        await rig.complete(temperature=0.25)

        by_default, asked = (queue.sampling for queue in rig.client.queues)
        assert (by_default.temperature, by_default.top_k) == (0.5, 3)
        assert (asked.temperature, asked.top_k) == (0.25, 3)
