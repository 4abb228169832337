"""lm-eval's local-completions: multiple choice, perplexity and generation, with local data."""

from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

pytestmark = pytest.mark.clients

DATA: Any = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path(__file__).parent / "capitals.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
CHOOSE = {
    **DATA,
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
READ = {
    **DATA,
    "task": "read",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}} {{choices[answer]}}.",
    "metric_list": [{"metric": "bits_per_byte"}],
}
WRITE = {
    **DATA,
    "task": "write",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n", ".", ","], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "ignore_case": True}],
}


@pytest.fixture(autouse=True)
def local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def evaluate(model: str, url: str, *tasks: dict[str, Any], **model_args: Any) -> dict[str, Any]:
    done = simple_evaluate(
        model=model,
        model_args={"model": "demo", "base_url": url, **model_args},
        tasks=list(tasks),
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
    )
    assert done is not None
    return done


def responses_of(done: dict[str, Any], task: str) -> list[Any]:
    return [sample["resps"] for sample in done["samples"][task]]


def test_every_kind_of_task_scores_the_same_with_tokens_and_with_text(base_url: str) -> None:
    ask: Any = ("local-completions", f"{base_url}/completions", CHOOSE, READ, WRITE)
    tokens = evaluate(*ask, batch_size=3, num_concurrent=2)

    texts = evaluate(*ask, tokenized_requests=False)

    assert tokens["results"]["choose"]["acc,none"] == 1
    assert 0 < tokens["results"]["read"]["bits_per_byte,none"] < 2
    for name in ("choose", "read"):
        scores = tokens["results"][name]
        assert texts["results"][name] == pytest.approx(scores, abs=1e-5, nan_ok=True)
    assert responses_of(texts, "write") == responses_of(tokens, "write")


def test_chat_completions_are_evaluated(base_url: str) -> None:
    done = evaluate("local-chat-completions", f"{base_url}/chat/completions", WRITE)

    assert all(answers[0][0] for answers in responses_of(done, "write"))
