"""Random heads that draft from hidden states, in the layouts of their published checkpoints, and
the expected drafts, computed with dense code of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

Draft = Callable[[list[int], int], list[int]]
"""Called with a text and a count; gives `count` draft tokens after the text."""
DRAFT_VOCAB = 200


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    numbers: Tensor = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
    return numbers


def _one_layer(target: Path, **changes: Any) -> Any:
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _shape_up(module: Any, seed: int) -> Any:
    """Initialize random weights that do not repeat the same token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(2 * _random(generator, *parameter.shape))
            else:
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.copy_(noise + (0.5 if "bias" not in name else 0))
    return module.requires_grad_(False)


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


class _Target:
    """The parts of the target model that heads use."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.embed = self.model.get_input_embeddings()
        self.head = self.model.lm_head

    def hidden(self, text: list[int]) -> tuple[Tensor, ...]:
        """Hidden states before each layer and after the last norm."""
        ids = torch.tensor([text])
        out: tuple[Tensor, ...] = self.model(ids, output_hidden_states=True).hidden_states
        return out


def _drafts(
    target: _Target,
    known: Callable[[list[int]], Tensor],
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    choose: Callable[[Tensor], int],
) -> Draft:
    """A drafter from three functions. `known` returns the hidden states of a text. `run` takes
    embeddings and hidden states, and returns the hidden states for the head and for the next call.
    `choose` takes a hidden state and returns a token."""

    @torch.no_grad()
    def draft(text: list[int], count: int) -> list[int]:
        hidden = known(text[:-1])
        tokens = text[1:]
        drafts: list[int] = []
        for _ in range(count):
            for_head, following = run(target.embed(torch.tensor([tokens])), hidden)
            drafts.append(choose(for_head[0, -1]))
            tokens = [*tokens, drafts[-1]]
            hidden = torch.cat((hidden, following[:, -1:]), dim=1)
        return drafts

    return draft


def make_eagle(target_folder: Path, folder: Path) -> Draft:
    """Write an EAGLE checkpoint: names without a prefix, and a copy of the embedding."""
    target = _Target(target_folder)
    config = _one_layer(target_folder)
    model: Any = _shape_up(LlamaModel(config), 1)
    size = config.hidden_size
    fc = _shape_up(nn.Linear(2 * size, size, bias=False), 2)
    tensors = {
        name: tensor
        for name, tensor in model.layers.state_dict(prefix="layers.").items()
        if "input_layernorm" not in name
    }
    tensors |= {"fc.weight": fc.weight, "embed_tokens.weight": target.embed.weight}
    _save(folder, {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, tensors)
    model.layers[0].input_layernorm = model.norm = nn.Identity()

    def run(embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out = model(inputs_embeds=fc(torch.cat((embeds, hidden), -1))).last_hidden_state
        return out, out

    return _drafts(
        target, lambda text: target.hidden(text)[-1], run, lambda x: int(target.head(x).argmax())
    )


class _Eagle3Layer(nn.Module):
    def __init__(self, layer: Any, hidden_norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.hidden_norm = layer, hidden_norm

    def forward(self, both: Tensor, **options: Any) -> Tensor:
        embeds, hidden = both.chunk(2, -1)
        normed = torch.cat((self.layer.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.layer.self_attn(hidden_states=normed, **options)[0]
        out: Tensor = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        return out


def make_eagle3(target_folder: Path, folder: Path, kept: list[int]) -> Draft:
    """Write an EAGLE-3 checkpoint: a layer called midlayer, and a head over a part of the
    vocabulary. `kept`: target layers whose inputs are the hidden states that the head reads."""
    target = _Target(target_folder)
    config = _one_layer(target_folder)
    model: Any = LlamaModel(config)
    size, layer = config.hidden_size, model.layers[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = getattr(layer.self_attn, name).out_features
        setattr(layer.self_attn, name, nn.Linear(2 * size, rows, bias=False))
    _shape_up(model, 3)
    hidden_norm = _shape_up(type(model.norm)(size, config.rms_norm_eps), 4)
    fc = _shape_up(nn.Linear(3 * size, size, bias=False), 5)
    head = _shape_up(nn.Linear(size, DRAFT_VOCAB, bias=False), 6)
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randperm(config.vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = layer.state_dict(prefix="midlayer.")
    tensors |= {
        "midlayer.hidden_norm.weight": hidden_norm.weight,
        "norm.weight": model.norm.weight,
        "fc.weight": fc.weight,
        "lm_head.weight": head.weight,
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(config.vocab_size), chosen),
    }
    fields = {
        **config.to_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": kept,
    }
    _save(folder, fields, tensors)
    norm, model.norm = model.norm, nn.Identity()
    model.layers[0] = _Eagle3Layer(layer, hidden_norm)

    def run(embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out = model(inputs_embeds=torch.cat((embeds, hidden), -1)).last_hidden_state
        return norm(out), out

    def known(text: list[int]) -> Tensor:
        states = target.hidden(text)
        projected: Tensor = fc(torch.cat([states[index] for index in kept], -1))
        return projected

    return _drafts(target, known, run, lambda x: int(chosen[head(x).argmax()]))


def add_mtp_layer(folder: Path) -> Draft:
    """Append the layer for multi-token prediction to a DeepSeek-V3 or GLM-4.5 in `folder`."""
    target = _Target(folder)
    file = folder / "model.safetensors"
    config = _one_layer(folder, first_k_dense_replace=0)
    model: Any = _shape_up(type(target.model.model)(config), 8)
    size = config.hidden_size
    fc = _shape_up(nn.Linear(2 * size, size, bias=False), 9)
    enorm, hnorm = (
        _shape_up(type(model.norm)(size, config.rms_norm_eps), seed) for seed in (10, 11)
    )
    whole = json.loads((folder / "config.json").read_text())
    prefix = f"model.layers.{whole['num_hidden_layers']}."
    own: dict[str, Any] = _as_stored(model.layers[0].state_dict(), prefix)
    own |= {
        f"{prefix}enorm.weight": enorm.weight,
        f"{prefix}hnorm.weight": hnorm.weight,
        f"{prefix}eh_proj.weight": fc.weight,
        f"{prefix}shared_head.norm.weight": model.norm.weight,
        f"{prefix}shared_head.head.weight": target.head.weight,
        f"{prefix}embed_tokens.weight": target.embed.weight,
    }
    _save(folder, {**whole, "num_nextn_predict_layers": 1}, {**load_file(file), **own})
    norm, model.norm = model.norm, nn.Identity()

    def run(embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embeds = embeds.clone()
        embeds[:, 0] = 0
        both = torch.cat((enorm(embeds), hnorm(hidden)), -1)
        out = model(inputs_embeds=fc(both)).last_hidden_state
        return norm(out), out

    return _drafts(
        target, lambda text: target.hidden(text)[-1], run, lambda x: int(target.head(x).argmax())
    )


def _as_stored(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The state of a layer with separate tensors for each expert, as checkpoints store it."""
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stored[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = gate
                stored[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = up
        elif name == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                stored[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            stored[prefix + name] = tensor
    return stored


def make_medusa(target_folder: Path, folder: Path, *, is_original: bool) -> Draft:
    """Write a Medusa checkpoint with two residual blocks: with vLLM's names, or with the original
    names and biases."""
    target = _Target(target_folder)
    config = target.model.config
    size, vocab, num_heads = config.hidden_size, config.vocab_size, 3
    blocks = [
        [_shape_up(nn.Linear(size, size, bias=is_original), 20 + 2 * i + j) for j in range(2)]
        for i in range(num_heads)
    ]
    heads = [_shape_up(nn.Linear(size, vocab, bias=False), 30 + i) for i in range(num_heads)]
    tensors: dict[str, Tensor] = {}
    for i, (block, head) in enumerate(zip(blocks, heads, strict=True)):
        for j, layer in enumerate(block):
            name = f"medusa_heads.{i}.{j}.linear." if is_original else f"blocks.{i}.layers.{j}."
            tensors |= layer.state_dict(prefix=name)
        name = f"medusa_heads.{i}.2.weight" if is_original else f"lm_heads.{i}.weight"
        tensors[name] = head.weight
    fields = {"medusa_num_heads": num_heads, "medusa_num_layers": 2}
    if not is_original:
        fields = {"num_heads": num_heads, "num_hidden_layers": 2, "hidden_size": size}
    _save(folder, {"model_type": "medusa", **fields}, tensors)

    @torch.no_grad()
    def draft(text: list[int], count: int) -> list[int]:
        drafts = []
        for block, head in zip(blocks[:count], heads[:count], strict=True):
            hidden = target.hidden(text[:-1])[-1][0, -1]
            for layer in block:
                hidden = hidden + nn.functional.silu(layer(hidden))
            drafts.append(int(head(hidden).argmax()))
        return drafts

    return draft


def make_mlp_speculator(target_folder: Path, folder: Path, *, is_tied: bool) -> Draft:
    """Write an IBM MLP speculator; with `is_tied`, also with a norm of its input."""
    target = _Target(target_folder)
    config = target.model.config
    size, vocab, inner, num_heads = config.hidden_size, config.vocab_size, 48, 3
    own = 1 if is_tied else num_heads
    proj = [
        _shape_up(nn.Linear(size if i == 0 else inner, inner, bias=False), 40 + i)
        for i in range(2 if is_tied else num_heads)
    ]
    emb = [_shape_up(nn.Embedding(vocab, inner), 50 + i) for i in range(own)]
    head = [_shape_up(nn.Linear(inner, vocab, bias=False), 60 + i) for i in range(own)]
    norm = [_shape_up(nn.LayerNorm(inner), 70 + i) for i in range(own)]
    tensors: dict[str, Tensor] = {}
    for name, modules in (("proj", proj), ("emb", emb), ("head", head), ("ln", norm)):
        for i, module in enumerate(modules):
            tensors |= module.state_dict(prefix=f"speculator.{name}.{i}.")
    fields = {
        "model_type": "mlp_speculator",
        "n_predict": num_heads,
        "emb_dim": size,
        "inner_dim": inner,
        "vocab_size": vocab,
        "tie_weights": is_tied,
        "scale_input": is_tied,
    }
    _save(folder, fields, tensors)

    def rms(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6)

    @torch.no_grad()
    def draft(text: list[int], count: int) -> list[int]:
        state = target.hidden(text[:-1])[-1][0, -1]
        if is_tied:
            state = rms(state) / 2**0.5
        weight = 0.5 ** (0.5 / num_heads)
        scale = ((1 - weight**2) * inner / 2) ** 0.5 / weight
        drafts = [text[-1]]
        for i in range(count):
            k = 0 if is_tied else i
            state = proj[min(i, len(proj) - 1)](state) + scale * emb[k].weight[drafts[-1]]
            state = nn.functional.gelu(rms(state) * norm[k].weight + norm[k].bias)
            drafts.append(int(head[k](state).argmax()))
        return drafts[1:]

    return draft


def make_head(method: str, folder: Path, head: Path) -> tuple[Path, dict[str, Any], Draft]:
    """(target, config keys, expected drafts)."""
    if method == "mtp":
        target = make_tiny("deepseek_v3", folder)
        return target, {}, add_mtp_layer(target)
    target = make_tiny("llama", folder, num_hidden_layers=3)
    makers: dict[str, Callable[[], Draft]] = {
        "eagle": lambda: make_eagle(target, head),
        "eagle3": lambda: make_eagle3(target, head, [0, 1, 2]),
        "medusa": lambda: make_medusa(target, head, is_original=False),
        "mlp_speculator": lambda: make_mlp_speculator(target, head, is_tied=True),
    }
    return target, {"model": str(head)}, makers[method]()
