"""benchmarks/perplexity.py: its perplexity equals transformers'."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from benchmarks.perplexity import Measured, main, rows
from gaudiserve import LLM
from server.offline.perplexity import TEXT, Reading, perplexity

WINDOW = 100
BEGIN, BEGIN_ID = "<|endoftext|>", 0
PARAGRAPH = TEXT.read_text(encoding="utf-8")[:600]


@pytest.mark.parametrize("begins", [False, True], ids=["bare", "behind a begin token"])
def test_perplexity_is_exp_of_the_loss_of_transformers(
    tiny_model: str, tmp_path: Path, begins: bool
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(PARAGRAPH).ids
    if begins:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder).float()
    total, count, at = 0.0, 0, 0
    while at < len(tokens) - (not begins):
        window = [BEGIN_ID, *tokens[at : at + WINDOW - 1]] if begins else tokens[at : at + WINDOW]
        ids = torch.tensor([window])
        with torch.inference_mode():
            total += float(model(ids, labels=ids).loss) * (len(window) - 1)
        count += len(window) - 1
        at += WINDOW - 1

    with LLM(str(folder), dtype="float32", max_model_len=128, max_num_seqs=4) as llm:
        found = perplexity(llm, PARAGRAPH, WINDOW)

    assert count == len(tokens) - (not begins) > 2 * WINDOW
    assert found == pytest.approx(math.exp(total / count), rel=1e-4)


def test_ratio_and_agreement_are_relative_to_the_first_variant() -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    whole = Measured("none", "float32", "auto", Reading([half, half], [7, 8]), 400, 10.0)
    packed = Measured("int8", "float32", "auto", Reading([half, quarter], [7, 9]), 100, 20.0)

    table = rows([whole, packed])

    assert [item["perplexity"] for item in table] == pytest.approx([2, 2 * math.sqrt(2)])
    assert [item["ratio"] for item in table] == pytest.approx([1, math.sqrt(2)])
    assert [item["agreement"] for item in table] == [1, 0.5]


def test_the_command_writes_a_table_and_json(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, table, figures = tmp_path / "text", tmp_path / "table.md", tmp_path / "figures.json"
    text.write_text(PARAGRAPH)
    sizes = ["--window=64", "--tokens=4", "--rounds=1", "--set=num-gpu-blocks-override=64"]
    files = [f"--text={text}", f"--markdown={table}", f"--json={figures}"]

    status = main([tiny_model, "--variants=none", "--dtype=float32", *sizes, *files])

    (variant,) = json.loads(figures.read_text())["variants"]
    assert status == 0
    assert capsys.readouterr().out == table.read_text()
    assert (
        f"| none | float32 | auto | {variant['perplexity']:.3f} | 1.0000 | 100.0% |"
        in table.read_text()
    )
    assert variant["weight_bytes"] > 0 and variant["tokens_per_s"] > 0
