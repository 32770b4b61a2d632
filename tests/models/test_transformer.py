"""The textbook model against independent programs: torch's own Transformer, and a dense reference written out here.

Every pair of choices occurs in some combination (`PAIRWISE`).

Shapes: B batch, T tokens, H heads, D head width, C model width.
"""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_ext
from hf_ext import ExtTransformerConfig, ExtTransformerForCausalLM, ExtTransformerModel
from hf_ext.layers.position_schemes import NoPositions
from hf_ext.registry import FEEDFORWARDS, NORMS, POSITIONS, Registry

TINY = {
    "vocab_size": 43,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "position_options": None,
}
HEADS = {
    "encoder": "ExtTransformerForMaskedLM",
    "decoder": "ExtTransformerForCausalLM",
    "encoder-decoder": "ExtTransformerForConditionalGeneration",
}
CHOICES = {
    "architecture": list(HEADS),
    "norm_placement": ["post", "pre", "both", "parallel"],
    "norm": list(NORMS),
    "feedforward": list(FEEDFORWARDS),
    "positions": list(POSITIONS),
    "num_key_value_heads": [4, 2, 1],
    "bias": [True, False],
    "tie_word_embeddings": [True, False],
    "scale_embedding": [True, False],
}


def pairwise(choices: dict[str, list], seed: int = 0) -> list[dict]:
    """Combinations in which every pair of values of two fields occurs: rows are drawn, and of several the one with the
    most new pairs is kept."""
    draw, names = random.Random(seed), list(choices)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in choices[a] for y in choices[b]
    }  # fmt: skip
    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=str)
        drawn = [{**{n: draw.choice(v) for n, v in choices.items()}, a: x, b: y} for _ in range(30)]
        pairs = [set(itertools.combinations(row.items(), 2)) & missing for row in drawn]
        best = max(range(len(drawn)), key=lambda i: len(pairs[i]))
        rows.append(drawn[best])
        missing -= pairs[best]
    return rows


PAIRWISE = pairwise(CHOICES)
every_combination = pytest.mark.parametrize("choices", PAIRWISE, ids=lambda c: "-".join(str(v) for v in c.values()))


def build(seed: int = 0, head: str | None = None, **choices: object) -> nn.Module:
    """A model with random values everywhere, in eval mode."""
    config = ExtTransformerConfig(**{**TINY, **choices})
    model = getattr(hf_ext, head or HEADS[config.architecture])(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.25 * noise)
    return model.eval()


def batch(architecture: str, seed: int = 1) -> dict[str, Tensor]:
    """Three rows, two of them padded: on the left for a decoder, which goes on where a row ends."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = torch.randint(3, 43, (3, 7), generator=generator), torch.ones(3, 7, dtype=torch.long)
    mask[0, 4:], mask[1, 6:] = 0, 0
    if architecture == "decoder":
        mask = mask.flip(1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


# --- every combination --------------------------------------------------------------------------------------------


@every_combination
def test_trains_generates_and_comes_back(choices: dict, tmp_path: Path) -> None:
    model, inputs = build(**choices, label_smoothing=0.1), batch(choices["architecture"])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)

    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02), []
    for _ in range(4):
        torch.manual_seed(0)  # the same dropout
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()

    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        expected = model(**inputs, labels=labels)
        assert torch.equal(again(**inputs, labels=labels).logits, expected.logits)

    if choices["architecture"] == "encoder":
        return
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options["eos_token_id"] = None
    cached, uncached = (again.generate(**inputs, **options, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), atol=1e-5, rtol=1e-5)


# --- a dense reference --------------------------------------------------------------------------------------------


def reference_norm(x: Tensor, norm: nn.Module, eps: float = 1e-5) -> Tensor:
    """(..., C) -> (..., C), spelled out."""
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    return x if getattr(norm, "bias", None) is None else x + norm.bias


def reference_feed_forward(x: Tensor, module: nn.Module, name: str) -> Tensor:
    """(..., C) -> (..., C), spelled out."""
    gelu = lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2  # noqa: E731
    act = {"relu": lambda x: x.clamp(min=0), "gelu": gelu, "geglu": gelu, "swiglu": lambda x: x * x.sigmoid()}[name]
    if name in ("relu", "gelu"):
        return module.down_proj(act(module.up_proj(x)))
    return module.down_proj(act(module.gate_proj(x)) * module.up_proj(x))


def reference_turn(x: Tensor, theta: float = 10000.0) -> Tensor:
    """(B, H, T, D) -> the same, pairs (i, i + D / 2) as complex numbers turned by their position."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def reference_bucket(distance: int, causal: bool, count: int = 32, longest: int = 128) -> int:
    """T5's bucket of (place of the key - place of the query), one number at a time."""
    first = 0
    if not causal:
        count //= 2
        first = count if distance > 0 else 0
    away = max(-distance, 0) if causal else abs(distance)
    if away < count // 2:
        return first + away
    exact = count // 2
    return first + min(exact + int(math.log(away / exact) / math.log(longest / exact) * (count - exact)), count - 1)


def reference_attention(x: Tensor, read: Tensor, module: nn.Module, scheme: nn.Module | None, name: str) -> Tensor:
    """Attention of x (B, Q, C) to `read` (B, K, C) with all H x Q x K scores; (B, Q, C)."""
    heads, width = 4, module.head_dim

    def split(y: Tensor) -> Tensor:
        y = y.unflatten(-1, (-1, width)).transpose(1, 2)
        return y.repeat_interleave(heads // y.shape[1], dim=1)

    query, key, value = split(module.q_proj(x)), split(module.k_proj(read)), split(module.v_proj(read))
    if name == "rotary":
        query, key = reference_turn(query), reference_turn(key)
    scores = query @ key.transpose(2, 3) / math.sqrt(width)
    if name in ("alibi", "relative"):
        for q, k in itertools.product(range(x.shape[1]), range(read.shape[1])):
            if name == "alibi":
                bias = torch.tensor([-(2.0 ** (-2 * (h + 1))) * abs(q - k) for h in range(heads)])
            else:
                bias = scheme.table.weight[reference_bucket(k - q, module.is_causal)]
            scores[:, :, q, k] = scores[:, :, q, k] + bias
    if module.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return module.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def reference_half(half: nn.Module, ids: Tensor, memory: Tensor | None, config: ExtTransformerConfig) -> Tensor:
    """One half of the model on rows without padding: ids (B, T), the encoder's output (B, S, C) -> (B, T, C)."""
    x = half.embed_tokens.weight[ids] * (math.sqrt(16) if config.scale_embedding else 1)
    if config.positions == "learned":
        x = x + half.positions.table.weight[: ids.shape[1]]
    if config.positions == "sinusoidal":
        angles = torch.tensor([[p / 10000 ** (2 * i / 16) for i in range(8)] for p in range(ids.shape[1])])
        x = x + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    for block in half.layers:
        steps = {
            "self_attn": lambda y, b=block: reference_attention(y, y, b.self_attn, half.positions, config.positions),
            "cross_attn": lambda y, b=block: reference_attention(y, memory, b.cross_attn, None, ""),
            "feed_forward": lambda y, b=block: reference_feed_forward(y, b.feed_forward, config.feedforward),
        }
        if memory is None:
            del steps["cross_attn"]
        if config.norm_placement == "parallel":
            normed = reference_norm(x, block.norm)
            x = x + sum(step(normed) for step in steps.values())
            continue
        for name, step in steps.items():
            residual = getattr(block, f"{name}_residual")
            if config.norm_placement == "post":
                x = reference_norm(x + step(x), residual.norm)
            elif config.norm_placement == "pre":
                x = x + step(reference_norm(x, residual.norm))
            else:
                x = x + reference_norm(step(reference_norm(x, residual.norm)), residual.norm_after)
    return x if config.norm_placement == "post" else reference_norm(x, half.norm)


def reference(model: nn.Module, ids: Tensor, decoder_ids: Tensor) -> Tensor:
    """Logits of the whole model, spelled out."""
    base, config = model.model, model.config
    memory = reference_half(base.encoder, ids, None, config) if hasattr(base, "encoder") else None
    if config.architecture == "encoder":
        return memory @ model.lm_head.weight.t()
    ids = decoder_ids if memory is not None else ids
    return reference_half(base.decoder, ids, memory, config) @ model.lm_head.weight.t()


@every_combination
def test_is_the_dense_reference(choices: dict) -> None:
    """Logits and gradients, with sdpa and with eager attention."""
    ids, decoder_ids = (batch("encoder", seed)["input_ids"] + 3 for seed in (1, 2))
    ids, decoder_ids = ids.clamp(max=42), decoder_ids[:, :5].clamp(max=42)
    model = build(**choices).double()
    expected = reference(model, ids, decoder_ids)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    inputs = {"input_ids": ids}
    if choices["architecture"] == "encoder-decoder":
        inputs["decoder_input_ids"] = decoder_ids
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(**inputs).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-6)
        (logits * weights).sum().backward()
        for name, p in model.named_parameters():
            tolerance = 1e-5 * max(1.0, wanted[name].abs().max().item())  # positions and RMS norms are in fp32
            torch.testing.assert_close(p.grad, wanted[name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


# --- torch's own Transformer --------------------------------------------------------------------------------------


def copy_attention(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    for projection, weight, bias in zip((ours.q_proj, ours.k_proj, ours.v_proj), weights, biases, strict=True):
        projection.weight.copy_(weight)
        projection.bias.copy_(bias)
    ours.o_proj.load_state_dict(theirs.out_proj.state_dict())


@torch.no_grad()
def copy_half(theirs: nn.Module, ours: nn.Module) -> None:
    """The weights of a torch encoder or decoder into ours."""
    for layer, block in zip(theirs.layers, ours.layers, strict=True):
        copy_attention(layer.self_attn, block.self_attn)
        norms = [(layer.norm1, block.self_attn_residual)]
        if hasattr(layer, "multihead_attn"):
            copy_attention(layer.multihead_attn, block.cross_attn)
            norms += [(layer.norm2, block.cross_attn_residual), (layer.norm3, block.feed_forward_residual)]
        else:
            norms += [(layer.norm2, block.feed_forward_residual)]
        for norm, residual in norms:
            residual.norm.load_state_dict(norm.state_dict())
        block.feed_forward.up_proj.load_state_dict(layer.linear1.state_dict())
        block.feed_forward.down_proj.load_state_dict(layer.linear2.state_dict())
    ours.norm.load_state_dict(theirs.norm.state_dict() if theirs.norm is not None else {})


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_is_torch_transformer(placement: str, activation: str) -> None:
    """Outputs and gradients of `torch.nn.Transformer`, with padding in the encoder and with padding computed or not."""
    theirs = nn.Transformer(16, 4, 2, 3, 24, 0.0, activation, batch_first=True, norm_first=placement == "pre")
    if placement == "post":  # torch puts a norm after the last block in any case; the paper has none there
        theirs.encoder.norm = theirs.decoder.norm = None
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ours = build(
        head="ExtTransformerModel", norm_placement=placement, feedforward=activation, positions="none",
        scale_embedding=False, decoder_layers=3, dropout=0.0,
    )  # fmt: skip
    copy_half(theirs.encoder, ours.encoder)
    copy_half(theirs.decoder, ours.decoder)
    mask = batch("encoder")["attention_mask"]
    x, y = torch.randn(3, 7, 16, requires_grad=True), torch.randn(3, 5, 16, requires_grad=True)
    weights = torch.randn(3, 5, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = mask == 0
    expected = theirs.train()(
        x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True
    )
    wanted = torch.autograd.grad((expected * weights).sum(), [x, y, theirs.encoder.layers[0].linear1.weight])
    for skip_padding in (True, False):
        ours.config.skip_padding = skip_padding
        output = ours.train()(inputs_embeds=x, attention_mask=mask, decoder_inputs_embeds=y).last_hidden_state
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
        first = ours.encoder.layers[0].feed_forward.up_proj.weight
        for found, value in zip(torch.autograd.grad((output * weights).sum(), [x, y, first]), wanted, strict=True):
            torch.testing.assert_close(found, value, atol=2e-6, rtol=1e-5)


# --- padding, packed rows -----------------------------------------------------------------------------------------

every_scheme = pytest.mark.parametrize("positions", list(POSITIONS))


@every_scheme
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_is_left_out_and_changes_nothing(positions: str, attn: str) -> None:
    model = build(architecture="encoder", positions=positions)
    model.set_attn_implementation(attn)
    inputs = batch("encoder")
    seen = []
    handle = model.model.encoder.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    free, computed = model(**inputs).logits, model(**inputs, skip_padding=False).logits
    handle.remove()
    assert seen == [inputs["attention_mask"].sum(), 7]
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(free[real], computed[real], atol=2e-6, rtol=1e-5)
    for row, length in enumerate(real.sum(-1)):
        alone = model(input_ids=inputs["input_ids"][row : row + 1, :length]).logits
        torch.testing.assert_close(free[row, :length], alone[0], atol=2e-6, rtol=1e-5)


@every_scheme
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_rows_are_separate_texts(positions: str, attn: str) -> None:
    model = build(architecture="decoder", positions=positions, num_key_value_heads=2)
    model.set_attn_implementation(attn)
    texts = [torch.randint(3, 43, (1, n), generator=torch.Generator().manual_seed(n)) for n in (3, 6, 1, 5)]
    position_ids = torch.cat([torch.arange(t.shape[1]) for t in texts])[None]
    packed = model(input_ids=torch.cat(texts, 1), position_ids=position_ids).logits
    separate = torch.cat([model(input_ids=t).logits for t in texts], dim=1)
    torch.testing.assert_close(packed, separate, atol=2e-6, rtol=1e-5)


# --- presets, loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions", "exact"),
    [
        ("transformer-base", 65, 63_082_496),
        ("transformer-big", 213, 214_245_376),
        ("gpt-3-small", 125, 125_226_240),
        ("palm-style", 125, 124_856_064),
    ],
)
def test_presets_have_the_papers_sizes(name: str, millions: int, exact: int) -> None:
    config = ExtTransformerConfig.preset(name)
    with torch.device("meta"):
        model = getattr(hf_ext, HEADS[config.architecture])(config)
        model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    assert count == exact
    assert abs(count / 1e6 / millions - 1) < 0.03
    changed = ExtTransformerConfig.preset(name, num_hidden_layers=2)
    assert changed.num_hidden_layers == 2 and changed.decoder_layers in (2, None)


def test_palm_style_has_no_biases() -> None:
    with torch.device("meta"):
        model = ExtTransformerForCausalLM(ExtTransformerConfig.preset("palm-style"))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="transformer-base.*'transformer-huge'"):
        ExtTransformerConfig.preset("transformer-huge")


@pytest.mark.parametrize("architecture", list(HEADS))
def test_labels_are_smoothed_in_training_only(architecture: str) -> None:
    model, inputs = build(architecture=architecture, label_smoothing=0.3, dropout=0.0), batch(architecture)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    losses = []
    for training, smoothing in ((True, 0.3), (False, 0.0)):
        output = model.train(training)(**inputs, labels=labels, output_logits=True)
        targets = labels if architecture != "decoder" else nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        expected = nn.functional.cross_entropy(
            output.logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing
        )
        torch.testing.assert_close(output.loss, expected, atol=1e-5, rtol=1e-5)
        losses.append(output.loss.item())
    assert losses[0] != losses[1]


# --- choices of one's own -----------------------------------------------------------------------------------------


@pytest.fixture
def nearness():
    """A position scheme as a user writes it; it is taken out again."""

    def check(config: object) -> None:
        if config.num_attention_heads < 2:
            raise ValueError("nearness needs two heads")

    @hf_ext.register_position("nearness", check=check)
    class Nearness(NoPositions):
        """Scores fall with the logarithm of the distance, by a learned amount for each head."""

        has_bias = True

        def __init__(self, *, strength: float = 1.0, **sizes: int) -> None:
            super().__init__(**sizes)
            self.strength = nn.Parameter(torch.full((self.num_heads,), strength))

        def bias(self, queries: int, keys: int, past_length: int | Tensor, device: torch.device) -> Tensor:
            query = torch.arange(queries, device=device) + past_length
            distance = (query[:, None] - torch.arange(keys, device=device)).abs()
            return -self.strength[:, None, None] * torch.log1p(distance.float())[None, None]

    yield Nearness
    del POSITIONS.choices["nearness"]


@pytest.mark.parametrize("architecture", list(HEADS))
def test_positions_of_ones_own(architecture: str, nearness: type, tmp_path: Path) -> None:
    choices = {"architecture": architecture, "positions": "nearness", "position_options": {"strength": 2.0}}
    test_trains_generates_and_comes_back(choices, tmp_path)
    model = build(**choices)
    assert all(type(half.positions) is nearness for half in model.model.halves())
    plain = build(**choices | {"position_options": {}})
    assert plain.model.halves()[0].positions.strength.shape == (4,)
    if architecture == "encoder":  # the order of the tokens matters
        ids, order = batch(architecture)["input_ids"], torch.tensor([2, 0, 1, 6, 3, 5, 4])
        assert not torch.allclose(model(ids[:, order]).logits, model(ids).logits[:, order], atol=1e-3)
    with pytest.raises(ValueError, match="two heads"):
        ExtTransformerConfig(**{**TINY, **choices, "num_attention_heads": 1})
    with pytest.raises(ValueError, match="strength.*theta"):
        ExtTransformerConfig(**{**TINY, **choices, "position_options": {"theta": 1}})


def test_norms_and_feed_forwards_of_ones_own(tmp_path: Path) -> None:
    @hf_ext.register_norm("scale-only")
    class ScaleOnly(nn.Module):
        def __init__(self, width: int, *, eps: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    @hf_ext.register_feedforward("linear")
    class OneLinear(nn.Linear):
        def __init__(self, *, width: int, inner_width: int, bias: bool, dropout: float) -> None:
            super().__init__(width, width, bias=bias)

    try:
        choices = {"architecture": "decoder", "norm": "scale-only", "feedforward": "linear", "norm_placement": "both"}
        test_trains_generates_and_comes_back(choices, tmp_path)
    finally:
        del NORMS.choices["scale-only"], FEEDFORWARDS.choices["linear"]


def test_a_name_is_taken_once() -> None:
    registry = Registry("positions", ("width",), {})

    @registry.register("mine")
    class Mine:
        def __init__(self, *, width: int, depth: int = 1) -> None: ...

    assert registry["mine"] is Mine and registry.choice("mine").options == ("depth",) and list(registry) == ["mine"]
    registry.register("mine")(Mine)
    with pytest.raises(ValueError, match="'mine' is taken"):
        registry.register("mine")(type("Other", (), {}))
    with pytest.raises(ValueError, match="'sinusoidal' is taken"):
        hf_ext.register_position("sinusoidal")(Mine)
    with pytest.raises(ValueError, match="must be one of mine, got 'yours'.*registered"):
        registry["yours"]


@pytest.mark.parametrize("registry", [POSITIONS, NORMS, FEEDFORWARDS], ids=lambda r: r.field)
def test_built_in_entries_say_what_their_classes_take(registry: Registry) -> None:
    """The table spells out the options, so that a configuration can be checked without torch."""
    scratch = Registry(registry.field, registry.given, {})
    for name in registry:
        if registry is not NORMS:  # torch's LayerNorm has its own
            scratch.register(name)(registry[name])
            assert set(scratch.choice(name).options) == set(registry.choice(name).options)


# --- what is refused, what there is not ---------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", list(HEADS))
def test_a_head_refuses_another_architecture(architecture: str) -> None:
    config = ExtTransformerConfig(**TINY, architecture=architecture)
    for name in hf_ext.architecture_of("transformer").class_names():
        cls = getattr(hf_ext, name)
        if cls.needs_architecture in (None, architecture):
            cls(config)
        else:
            with pytest.raises(
                ValueError, match=f"{name} needs architecture='{cls.needs_architecture}'.*'{architecture}'"
            ):
                cls(config)


def test_there_is_nothing_official(tmp_path: Path) -> None:
    model = build(architecture="decoder")
    with pytest.raises(ValueError, match="ext_transformer.*no official architecture"):
        hf_ext.export_official(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="ExtTransformerConfig reads 'ext_transformer'"):
        ExtTransformerConfig(model_type="bert")
    model.save_pretrained(tmp_path)
    with hf_ext.takeover():
        assert type(AutoConfig.from_pretrained(tmp_path)) is ExtTransformerConfig
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is ExtTransformerForCausalLM
    assert hf_ext.architecture_of("ext_transformer").official_model_type is None


def test_too_long_for_the_table() -> None:
    for positions in ("learned", "sinusoidal"):
        model = build(architecture="decoder", positions=positions)
        with pytest.raises(ValueError, match="41 tokens.*max_position_embeddings=40"):
            model(torch.ones(1, 41, dtype=torch.long))


def test_biases_rule_out_flash_attention() -> None:
    assert not build(architecture="decoder", positions="relative")._supports_flash_attn
    assert build(architecture="decoder", positions="alibi")._supports_flash_attn
    assert not build(architecture="encoder", positions="alibi")._supports_flash_attn
    with pytest.raises(ValueError, match="does not support Flash Attention 2"):
        build(architecture="decoder", positions="relative", attn_implementation="flash_attention_2")


def test_bare_model_of_one_half() -> None:
    for architecture, half in (("encoder", "encoder"), ("decoder", "decoder")):
        model = ExtTransformerModel(ExtTransformerConfig(**TINY, architecture=architecture)).eval()
        model.set_attn_implementation("eager")
        assert [name for name, _ in model.named_children()] == [half]
        output = model(torch.ones(2, 3, dtype=torch.long), output_hidden_states=True, output_attentions=True)
        assert output.last_hidden_state.shape == (2, 3, 16)
        assert len(output.hidden_states) == 3 and len(output.attentions) == 2
        with pytest.raises(ValueError, match=f"decoder_input_ids given.*architecture='{architecture}'"):
            model(torch.ones(2, 3, dtype=torch.long), decoder_input_ids=torch.ones(2, 3, dtype=torch.long))
