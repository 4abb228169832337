"""LLM on a tiny real model: results, wrong arguments, and shutdown."""

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tqdm
from tiny_models import make_tiny
from waits import WAIT_S

from config.errors import ConfigError, EngineDied, PromptTooLong, UserError
from gaudiserve import LLM, RequestOutput, SamplingParams, __version__

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "max_model_len": 128,
    "device": "cpu",
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_a_model_on_a_card_turns_off_the_autoload_of_the_vendors_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PT_HPU_AUTOLOAD", "")
    monkeypatch.delenv("PT_HPU_AUTOLOAD")

    with pytest.raises(ConfigError, match="habana_frameworks, the Gaudi runtime"):
        LLM("m", device="hpu")

    assert os.environ["PT_HPU_AUTOLOAD"] == "0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SMALL) as made:
        yield made


def test_a_generating_model_refuses_pooling(llm: LLM) -> None:
    for call in (llm.embed, llm.classify):
        with pytest.raises(UserError, match="generates text"):
            call("Hello")
    with pytest.raises(UserError, match="generates text"):
        llm.score("Hello", "world")
    with pytest.raises(UserError, match="pooling_task is missing"):
        llm.encode("Hello")


def our_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("llm", "engine")]


def new_threads(before: set[threading.Thread]) -> list[str]:
    """Names of threads that were started since `before`, without tqdm's monitor, which never
    stops."""
    started = set(threading.enumerate()) - before
    return [thread.name for thread in started if not isinstance(thread, tqdm.TMonitor)]


def test_prompts_of_every_form_are_completed_in_order(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode_now("Hello", True)

    outputs = llm.generate(["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}, ids], GREEDY)

    assert [output.prompt for output in outputs] == ["Hello", "Hello", None, None]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    assert [int(output.request_id) for output in outputs] == sorted(
        int(output.request_id) for output in outputs
    )


@pytest.mark.parametrize("prompt", ["Hello", {"prompt": "Hello"}, [5, 6, 7]])
def test_a_single_prompt_needs_no_list(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY)

    assert isinstance(output, RequestOutput) and output.finished


def test_more_prompts_than_a_batch_get_the_answers_of_single_prompts(llm: LLM) -> None:
    prompts = [f"{'prompt ' * (place % 5)}{place}" for place in range(24)]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]

    together = llm.generate(prompts, GREEDY)

    assert [output.prompt for output in together] == prompts
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    lengths = [3, 1, 5]

    outputs = llm.generate(["a", "b", "c"], [GREEDY.replace(max_tokens=n) for n in lengths])

    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_lists_of_different_lengths_are_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(UserError, match="3 prompts have 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_choices_and_logprobs_have_the_form_of_vllm(llm: LLM) -> None:
    params = GREEDY.replace(n=2, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1)

    (output,) = llm.generate("Hello", params)

    assert [choice.index for choice in output.outputs] == [0, 1]
    for choice in output.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        chosen = [
            entry[token] for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
        ]
        assert choice.cumulative_logprob == pytest.approx(sum(e.logprob for e in chosen))
        assert all(2 <= len(entry) <= 3 for entry in choice.logprobs)
        assert "".join(entry.decoded_token for entry in chosen).isascii() or choice.text
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_token_ids[1] in (output.prompt_logprobs[1] or {})


def test_a_prompt_seen_before_is_found_in_the_cache(llm: LLM) -> None:
    prompt = list(range(10, 90))
    llm.generate(prompt, GREEDY)

    (output,) = llm.generate(prompt, GREEDY)

    assert 0 < output.num_cached_tokens < len(prompt)


def test_chat_renders_the_models_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]

    (single,) = llm.chat(talk, GREEDY)
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": "Yo"}]], GREEDY)

    assert single.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [output.prompt for output in two] == [
        single.prompt,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>assistant\n",
    ]


def test_the_last_message_can_be_continued(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]

    (output,) = llm.chat(talk, GREEDY, add_generation_prompt=False, continue_final_message=True)

    assert output.prompt is not None and output.prompt.endswith("assistant\nWell")


def test_the_end_of_a_prompt_is_kept_when_it_is_truncated(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7, 8], GREEDY.replace(truncate_prompt_tokens=2))

    assert output.prompt_token_ids == [7, 8]


def test_an_invalid_prompt_is_reported_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match="128 tokens"):
        llm.generate(["fine", [5] * 127, "fine"], GREEDY)
    (output,) = llm.generate("fine", GREEDY)

    assert output.finished


def test_bad_words_that_ban_every_allowed_token_are_refused(llm: LLM) -> None:
    pairs = tuple((first, second) for first in (50, 60) for second in (50, 60))
    cornered = SamplingParams(allowed_token_ids=(50, 60), bad_words_token_ids=pairs)

    with pytest.raises(UserError, match=r"exclude all of them at output token 2") as caught:
        llm.generate("fine", cornered)

    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "prompt_token_ids"),
        ({"text": "a"}, "prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": 1}, "a int, it must be a dict"),
        ({"prompt": "a", "multi_modal_data": {"sound": b""}}, "it may have image"),
    ],
)
def test_prompts_of_other_forms_are_refused(llm: LLM, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        llm.generate([wrong], GREEDY)


def test_an_empty_list_returns_an_empty_list(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_the_progress_bar_shows_the_finished_prompts(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)

    assert "2/2" in shown and "output tokens/s" in shown
    assert capsys.readouterr().err == ""


async def test_calls_work_inside_a_running_loop(llm: LLM) -> None:
    await asyncio.sleep(0)

    (output,) = llm.generate("Hello", GREEDY)

    assert output.finished


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_aborts_all_requests(llm: LLM) -> None:
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 2000, GREEDY.replace(max_tokens=100))
    timer.join()
    (output,) = llm.generate("Hello", GREEDY)
    stats = llm._client.stats

    assert output.finished
    assert (stats.running, stats.waiting) == (0, 0)


def test_a_wrong_keyword_names_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(str(folder), max_num_seq=4)


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_config_error_of_the_worker_is_raised_with_its_message(
    folder: Path, executor: str
) -> None:
    before = our_threads()
    flags = {"max_model_len": 64, "block_size": 16, "num_blocks": 2, "executor": executor}

    with pytest.raises(ConfigError, match="one full context of 64 tokens needs 4 blocks"):
        LLM(str(folder), **flags)

    assert our_threads() == before


def test_a_folder_without_a_model_raises_and_leaves_no_threads(tmp_path: Path) -> None:
    before = our_threads()

    with pytest.raises(ConfigError):
        LLM(str(tmp_path))

    assert our_threads() == before


def test_a_checkpoint_without_tokenizer_is_served_by_ids(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)

    with LLM(str(tmp_path), skip_tokenizer_init=True, **SMALL) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)
        with pytest.raises(UserError, match="skip_tokenizer_init"):
            llm.generate("text", GREEDY)

    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 8


def test_after_closing_nothing_runs_and_calls_are_refused(folder: Path) -> None:
    # Ignore threads and servers that other tests keep running.
    before = set(threading.enumerate())
    children = set(psutil.Process().children(recursive=True))
    llm = LLM(str(folder), **SMALL)
    llm.generate("a", GREEDY)

    llm.close()
    llm.close()

    with pytest.raises(EngineDied):
        llm.generate("a", GREEDY)
    deadline = time.monotonic() + WAIT_S
    while (left := new_threads(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
    assert set(psutil.Process().children(recursive=True)) <= children


def test_an_unreferenced_llm_is_collected_with_its_threads(folder: Path) -> None:
    llm = LLM(str(folder), **SMALL)
    gone = weakref.ref(llm)
    count = len(our_threads())

    del llm
    gc.collect()

    deadline = time.monotonic() + WAIT_S
    while len(our_threads()) > count - 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone() is None
    assert len(our_threads()) == count - 2


ENDINGS = {
    "forgotten": "",
    "held": "globals()['kept'] = llm",
    "raised": "raise SystemExit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_open_llm_does_not_block_interpreter_exit(folder: Path, ending: str) -> None:
    script = (
        "from gaudiserve import LLM, SamplingParams\n"
        f"llm = LLM({str(folder)!r}, **{SMALL!r})\n"
        "out = llm.generate('Hi', SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)\n"
        "print(len(out[0].outputs[0].token_ids))\n" + ENDINGS[ending]
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() in "1234"


def test_the_public_module_has_a_version() -> None:
    assert isinstance(__version__, str) and __version__


@pytest.mark.parametrize(("given", "expected"), [("auto", (0.25, 7)), ("vllm", (1.0, 0))])
def test_sampling_defaults_come_from_the_checkpoint_unless_disabled(
    folder: Path, tmp_path: Path, given: str, expected: tuple[float, int]
) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    recommended = {"do_sample": True, "temperature": 0.25, "top_k": 7}
    (own / "generation_config.json").write_text(json.dumps(recommended))

    with LLM(str(own), generation_config=given, **SMALL) as made:
        defaults = made.get_default_sampling_params()

    assert (defaults.temperature, defaults.top_k) == expected
