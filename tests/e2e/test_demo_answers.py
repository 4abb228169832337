"""The demo model's answers to plain questions on each instruction set of this CPU: the bfloat16
answers contain the words of the float32 answers."""

import re
from pathlib import Path

import pytest
from demo import demo_gguf

from config.checkpoint.demo import SAMPLING
from gaudiserve import LLM, SamplingParams
from hpu.host import cpu_flags
from hpu.native import library

ANSWERS = {
    "What is the capital of France?": "Paris",
    "What is 2+2?": "4",
    "What is the capital of Japan?": "Tokyo",
    "Who wrote Hamlet?": "Shakespeare",
    "What is the boiling point of water?": "100",
    "Name three fruits.": "Bananas",
    "How many days are in a week?": "7",
    "What is the opposite of hot?": "cold",
    "What is the largest ocean on Earth?": "Pacific",
    "What color is the sky?": "blue",
    "What is the chemical symbol for gold?": "Au",
    "What language is spoken in Brazil?": "Portuguese",
}
PAGE = Path(__file__).parents[2] / "server" / "page" / "welcome.js"
SHARED_START = 0.7
"""Mean fraction of an answer's characters that equals the float32 answer."""
PARAMS = SamplingParams(temperature=0, max_tokens=48)


WORDS = {"photosynthesis": "light", "seasons": "Winter", "walking": "1. ", "water cycle": "water"}
"""Words of the questions on the page's buttons, and words of their answers."""


def answers(dtype: str) -> list[str]:
    """Answers to the questions, computed one after the other as for a single user."""
    demo_gguf()
    with LLM(model="demo", dtype=dtype, max_model_len=512, max_num_seqs=2) as llm:
        asked = ([{"role": "user", "content": question}] for question in ANSWERS)
        return [llm.chat([chat], PARAMS, use_tqdm=False)[0].outputs[0].text for chat in asked]


@pytest.fixture(scope="module")
def exact() -> list[str]:
    return answers("float32")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ((), library.NEEDED),
        (("-march=haswell",), library.NEEDED),
        (("-march=skylake-avx512",), {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    ],
    ids=("native", "avx2", "avx512"),
)
def test_twelve_plain_questions_are_answered_on_each_instruction_set(
    flags: tuple[str, ...],
    needed: frozenset[str],
    exact: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not cpu_flags() >= needed:
        pytest.skip("the CPU lacks the instructions")
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, *flags))

    found = answers("bfloat16")

    for text, reference, word in zip(found, exact, ANSWERS.values(), strict=True):
        assert word in text and word in reference
    shares = [_shared_start(*pair) for pair in zip(found, exact, strict=True)]
    assert sum(shares) / len(shares) > SHARED_START


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_questions_on_the_page_are_answered_with_default_settings() -> None:
    demo_gguf()
    block = re.search(r"^const EXAMPLES = \[(.*?)\];", PAGE.read_text(), re.M | re.S)
    assert block is not None
    questions = re.findall(r'"(.*)",', block[1])
    assert len(questions) == len(WORDS)
    defaults = [SamplingParams(**SAMPLING, seed=seed) for seed in range(3)]
    with LLM(model="demo", max_model_len=1024) as llm:
        for params in (*defaults, SamplingParams(temperature=0, max_tokens=512)):
            chats = [[{"role": "user", "content": question}] for question in questions]
            outputs = llm.chat(chats, params, use_tqdm=False)

            for question, output in zip(questions, outputs, strict=True):
                (word,) = [found for part, found in WORDS.items() if part in question]
                assert word in output.outputs[0].text
                assert output.outputs[0].finish_reason == "stop", question


def _shared_start(text: str, reference: str) -> float:
    same = 0
    for mine, other in zip(text, reference, strict=False):
        if mine != other:
            break
        same += 1
    return same / len(reference)
