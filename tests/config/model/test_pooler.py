"""Which models return vectors, and how: their own files, sentence-transformers' files, and
settings."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import ENCODERS, write_json, write_modules
from tiny_models import COMMON

from config.engine import EngineConfig, SchedulerConfig
from config.errors import ConfigError, SettingError
from config.loading.sources import from_keywords, load
from config.model.pooler import PoolerConfig, choose_pooler
from config.model.read_config import read_model_config
from config.startup_checks import check_checkpoint, choose_context

OLD_MEAN = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}


def folder_of(folder: Path, architecture: str, **fields: Any) -> Path:
    encoder = architecture.startswith(("Bert", "XLM"))
    common = {**ENCODERS["bert"], "hidden_act": "gelu"} if encoder else COMMON
    write_json(folder / "config.json", {**common, "architectures": [architecture], **fields})
    return folder


def chosen(folder: Path, **settings: Any) -> PoolerConfig | None:
    config = EngineConfig(str(folder), **settings)
    return choose_pooler(config, read_model_config(str(folder)))


def given(folder: Path, **settings: Any) -> PoolerConfig:
    found = chosen(folder, **settings)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("architecture", "modes", "tasks"),
    [
        ("BertModel", ("cls",), ("embed", "token_embed")),
        ("BertForMaskedLM", ("cls",), ("embed", "token_embed")),
        ("Qwen3Model", ("lasttoken",), ("embed", "token_embed")),
        ("LlamaForSequenceClassification", ("lasttoken",), ("classify",)),
        ("XLMRobertaForSequenceClassification", ("cls",), ("classify",)),
    ],
)
def test_an_encoder_a_headless_model_and_a_classifier_are_pooling_models(
    architecture: str, modes: tuple[str, ...], tasks: tuple[str, ...], tmp_path: Path
) -> None:
    found = given(folder_of(tmp_path, architecture))

    assert (found.modes, found.facts.tasks) == (modes, tasks)
    assert found.facts.normalizes


def test_a_language_model_generates_unless_its_files_or_the_operator_select_pooling(
    tmp_path: Path,
) -> None:
    folder = folder_of(tmp_path, "Qwen3ForCausalLM")

    assert chosen(folder) is None
    assert given(folder, runner="pooling").modes == ("lasttoken",)
    assert given(folder, convert="embed").modes == ("lasttoken",)
    with pytest.raises(ConfigError, match="'generate' and --convert is 'embed'"):
        chosen(folder, runner="generate", convert="embed")
    with pytest.raises(ConfigError, match="--runner is 'pooling' and --convert is 'none'"):
        chosen(folder, runner="pooling", convert="none")
    write_modules(folder, "Transformer", "Pooling", pooling={"pooling_mode_lasttoken": True})
    assert given(folder).modes == ("lasttoken",)
    assert chosen(folder, runner="generate") is None
    with pytest.raises(ConfigError, match="BertModel, which is a pooling model"):
        chosen(folder_of(tmp_path, "BertModel"), runner="generate")


def test_sentence_transformers_files_are_read_in_full(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "BertModel", is_matryoshka=True)
    pooling = {"pooling_mode_cls_token": True, **OLD_MEAN, "include_prompt": False}
    write_modules(
        folder,
        *("Transformer", "Pooling", "Dense", "Normalize"),
        pooling=pooling,
        sentence_bert_config={"max_seq_length": 40, "do_lower_case": True},
        config_sentence_transformers={
            "prompts": {"query": "query: ", "passage": ""},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
    )
    dense = {"in_features": 128, "out_features": 16, "bias": False}
    write_json(folder / "2_Dense" / "config.json", dense)

    found = given(folder)

    facts = found.facts
    assert found.modes == ("cls", "mean")
    assert (found.dense[0].out_size, found.dense[0].activation) == (16, "Tanh")
    assert not found.dense[0].has_bias
    assert (facts.width, facts.token_width, facts.dimensions) == (16, 64, None)
    assert (facts.normalizes, facts.includes_prompt, facts.lowers_case) == (True, False, True)
    assert (facts.prompts, facts.default_prompt) == ({"query": "query: ", "passage": ""}, "query")
    assert (facts.similarity, found.max_tokens) == ("dot", 40)


@pytest.mark.parametrize(
    ("pooling", "modes"),
    [
        ({"pooling_mode": "weightedmean"}, ("weightedmean",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({}, ("mean",)),
    ],
)
def test_pooling_modes_are_read_from_newer_files(
    pooling: dict[str, Any], modes: tuple[str, ...], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "BertModel")
    write_modules(folder, "Transformer", "Pooling", pooling=pooling)

    found = given(folder)

    assert (found.modes, found.facts.normalizes) == (modes, False)


def test_truncate_dim_is_the_width_of_vectors(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "BertModel")
    settings = {"truncate_dim": 24}
    write_modules(folder, "Transformer", "Pooling", config_sentence_transformers=settings)

    assert given(folder).facts.width == 24

    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 65})
    assert given(folder).facts.width == 64


def test_a_message_modality_of_sentence_transformers_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Qwen3ForCausalLM")
    modality = {"method": "forward", "method_output_name": "last_hidden_state"}
    write_modules(
        folder,
        *("Transformer", "Pooling"),
        sentence_bert_config={"modality_config": {"text": modality, "message": modality}},
    )

    with pytest.raises(ConfigError, match=r"modality_config of .* has 'message', .* remove it"):
        chosen(folder)

    write_json(folder / "sentence_bert_config.json", {"modality_config": {"text": modality}})
    assert chosen(folder) is not None


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "LSTM"), {}, "Transformer, LSTM"),
        (("Transformer", "Pooling", "Normalize", "Dense"), {}, "Normalize, Dense"),
        (("Transformer", "Pooling"), {"pooling_mode": "median"}, "median"),
        (("Transformer", "Pooling", "Dense"), OLD_MEAN, "has no in_features"),
    ],
)
def test_unsupported_modules_of_sentence_transformers_are_refused(
    kinds: tuple[str, ...], pooling: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "BertModel")
    write_modules(folder, *kinds, pooling=pooling)

    with pytest.raises(ConfigError, match=words):
        chosen(folder)


def test_a_module_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "BertModel")
    write_modules(folder, "Transformer", "Pooling")
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "../secret"
    write_json(folder / "modules.json", listed)

    with pytest.raises(ConfigError, match=r"'\.\./secret', it must be in the folder"):
        chosen(folder)


def test_the_operator_may_override_the_pooling_settings(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "BertModel")
    asked = {"pooling_type": "MEAN", "normalize": False, "matryoshka_dimensions": [32, 16]}

    found = given(folder, pooler_config=json.dumps(asked))

    assert (found.modes, found.facts.normalizes) == (("mean",), False)
    assert found.facts.dimensions == (16, 32)
    for text, words in (
        ("{", "which is not JSON"),
        ('{"step_tag_id": 1}', "has step_tag_id"),
        ('{"pooling_type": "STEP"}', "is 'step'"),
        ('{"normalize": 1}', "must be a bool"),
    ):
        with pytest.raises(ConfigError, match=words):
            chosen(folder, pooler_config=text)


@pytest.mark.parametrize(
    ("fields", "activation", "labels"),
    [
        ({"num_labels": 3}, "softmax", ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"id2label": {"0": "no"}}, "sigmoid", ("no",)),
        ({"id2label": {"0": "a", "1": "b"}}, "softmax", ("a", "b")),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid", None),
        ({"num_labels": 1, "problem_type": "regression"}, "identity", None),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "identity",
            None,
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "sigmoid",
            None,
        ),
    ],
)
def test_labels_and_activation_of_a_head_come_from_its_files(
    fields: dict[str, Any], activation: str, labels: tuple[str, ...] | None, tmp_path: Path
) -> None:
    found = given(folder_of(tmp_path, "BertForSequenceClassification", **fields))

    assert found.has_head and found.activation == activation
    assert labels is None or found.facts.labels == labels
    assert ("score" in found.facts.tasks) == (len(found.facts.labels) == 1)


def test_a_text_has_to_fit_into_one_step(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "BertModel", max_position_embeddings=128)
    model = read_model_config(str(folder))
    small = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100)

    def context(**settings: Any) -> int:
        config = EngineConfig(str(folder), **settings)
        return choose_context(config, model, choose_pooler(config, model))

    assert (context(), context(scheduler=small)) == (128, 100)
    write_modules(*(folder, "Transformer", "Pooling"), sentence_bert_config={"max_seq_length": 64})
    assert (context(), context(max_model_len=120)) == (64, 120)
    with pytest.raises(ConfigError, match="is 101 and --max-num-batched-tokens is 100"):
        check_checkpoint(EngineConfig(str(folder), max_model_len=101, scheduler=small), str(folder))


def test_the_default_token_budget_holds_the_longest_text(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "LlamaForSequenceClassification", max_position_embeddings=8192)
    model = read_model_config(str(folder))

    def context(max_model_len: int | None) -> int:
        config = EngineConfig(str(folder), max_model_len=max_model_len)
        return choose_context(config, model, choose_pooler(config, model))

    assert (context(None), context(4000)) == (8192, 4000)
    assert SchedulerConfig().token_budget() == 2048
    assert SchedulerConfig().token_budget(8192) == 2048
    assert SchedulerConfig().token_budget(8192, is_pooling=True) == 8192
    assert SchedulerConfig().token_budget(1000, is_pooling=True) == 2048
    fixed = SchedulerConfig(max_num_batched_tokens=100)
    assert fixed.token_budget(8192, is_pooling=True) == 100


def test_a_step_without_chunks_holds_the_longest_prompt(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "LlamaForCausalLM", max_position_embeddings=8192)
    model = read_model_config(str(folder))

    def context(max_num_batched_tokens: int | None, max_model_len: int | None) -> int:
        schedule = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, enable_chunked_prefill=False
        )
        config = EngineConfig(str(folder), max_model_len=max_model_len, scheduler=schedule)
        return choose_context(config, model, None)

    assert SchedulerConfig(enable_chunked_prefill=False).token_budget(8192) == 8192
    assert [context(None, None), context(8192, None), context(4000, 4000)] == [8192, 8192, 4000]
    for max_model_len, longest in ((None, 8192), (5000, 5000)):
        with pytest.raises(
            SettingError,
            match=f"--max-num-batched-tokens is 4000 and --max-model-len is {longest}: .* set "
            f"--max-num-batched-tokens to {longest} or more, or --max-model-len to 4000 or less",
        ):
            context(4000, max_model_len)


@pytest.mark.parametrize(
    ("files", "longest"),
    [
        ({"sentence_roberta_config": {"max_seq_length": 40}}, 40),
        ({"tokenizer_config": {"model_max_length": 50}}, 50),
        ({"tokenizer_config": {"model_max_length": 10**30}}, 130),
        (
            {
                "sentence_bert_config": {"max_seq_length": 60},
                "tokenizer_config": {"model_max_length": 50},
            },
            60,
        ),
    ],
)
def test_the_longest_text_is_read_from_several_files(
    files: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "BertModel")
    write_modules(folder, "Transformer", "Pooling", **files)
    config, model = EngineConfig(str(folder)), read_model_config(str(folder))

    assert choose_context(config, model, choose_pooler(config, model)) == longest


def test_the_pooling_flags_have_the_old_names_of_vllm() -> None:
    settings = load(["some/model", "--task", "embed"], environ={}).engine
    keywords = from_keywords(model="some/model", override_pooler_config={"pooling_type": "MEAN"})

    assert settings.runner == "pooling"
    assert json.loads(keywords.engine.pooler_config) == {"pooling_type": "MEAN"}
