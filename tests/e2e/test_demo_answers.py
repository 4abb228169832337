"""The demo model's answers to plain questions on each instruction set of this CPU: in bfloat16 they
have the words that those in float32 have."""

import pytest
from demo import demo_gguf

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
SHARED_START = 0.7
"""Part of each answer's characters that is the same as in float32, in the mean."""
PARAMS = SamplingParams(temperature=0, max_tokens=48)


def answers(dtype: str) -> list[str]:
    """One request at a time, as a person asks."""
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


def _shared_start(text: str, reference: str) -> float:
    same = 0
    for mine, other in zip(text, reference, strict=False):
        if mine != other:
            break
        same += 1
    return same / len(reference)
