"""GPT-Neo: Large Scale Autoregressive Language Modeling with Mesh-Tensorflow (Black et al., 2021,
https://doi.org/10.5281/zenodo.5297715).

Official checkpoints: EleutherAI/gpt-neo-125m, -1.3B, -2.7B, roneneldan/TinyStories-33M, and every `model_type: gpt_neo`
file. GPT-2 with every other layer local: its tokens see the last `window_size` tokens, their own included. The scores
are not scaled, which initial values of Mesh-TensorFlow made up for.

Shapes: B batch, T tokens, K keys, H heads, C model width, F feed-forward width.
"""

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ext.heads import (
    CausalLMModel,
    DecoderQuestionAnsweringModel,
    DecoderTokenClassificationModel,
    LastTokenClassificationModel,
    TaskLinear,
    classifier_dropout,
)
from hf_ext.layers.attention import AttentionCore, upcast_attention
from hf_ext.layers.embeddings import embed_words_and_positions
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.patterns.sliding_window import WindowAttentionCore
from hf_ext.modeling import DecoderModel, ExtPreTrainedModel, positional
from hf_ext.models.gpt_neo.configuration_gpt_neo import ExtGPTNeoConfig

ORDER = ("input_ids", "past_key_values", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
SWITCHES = ("output_attentions", "output_hidden_states", "return_dict")


class ExtGPTNeoSelfAttention(AttentionCore):
    """Multi-head causal attention with unscaled scores, which are computed in fp32: they grow large."""

    def __init__(self, config: ExtGPTNeoConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_heads,
            head_dim=config.hidden_size // config.num_heads,
            is_causal=True,
            dropout=config.attention_dropout,
            scaling=1.0,
        )
        self.eager_attention = upcast_attention
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.resid_dropout = nn.Dropout(config.resid_dropout)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), **kwargs)
        return self.resid_dropout(self.out_proj(mixed)), weights


class ExtGPTNeoLocalSelfAttention(WindowAttentionCore, ExtGPTNeoSelfAttention):
    """The same over the last `window_size` tokens."""

    def __init__(self, config: ExtGPTNeoConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = config.window_size


class ExtGPTNeoAttention(nn.Module):
    """A layer's attention, global or local: the level `attn.attention` of the checkpoint's names."""

    def __init__(self, config: ExtGPTNeoConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        local = self.layer_type == "sliding_attention"
        self.attention = (ExtGPTNeoLocalSelfAttention if local else ExtGPTNeoSelfAttention)(config, layer_idx)

    def forward(self, x: Tensor, *, attention_mask: dict[str, object], **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C); `attention_mask` holds one for each type of layers."""
        return self.attention(x, attention_mask=attention_mask[self.layer_type], **kwargs)[0]


class ExtGPTNeoMLP(nn.Module):
    """C -> F -> C."""

    def __init__(self, config: ExtGPTNeoConfig) -> None:
        super().__init__()
        inner_width = 4 * config.hidden_size if config.intermediate_size is None else config.intermediate_size
        self.c_fc = nn.Linear(config.hidden_size, inner_width)
        self.c_proj = nn.Linear(inner_width, config.hidden_size)
        self.act = make_activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class ExtGPTNeoBlock(GradientCheckpointingLayer):
    """Pre-LN block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ExtGPTNeoConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = ExtGPTNeoAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = ExtGPTNeoMLP(config)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.attn(self.ln_1(x), **kwargs)
        return x + self.mlp(self.ln_2(x))


class ExtGPTNeoPreTrainedModel(ExtPreTrainedModel):
    """Base of all GPT-Neo classes."""

    config: ExtGPTNeoConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["ExtGPTNeoBlock"]
    # Official files hold the mask of every layer.
    _keys_to_ignore_on_load_unexpected = [r"h\.\d+\.attn\.attention\.(masked_)?bias$"]
    _can_record_outputs = {"hidden_states": ExtGPTNeoBlock, "attentions": ExtGPTNeoSelfAttention}


@positional(*ORDER, "use_cache", *SWITCHES)
class ExtGPTNeoModel(DecoderModel, ExtGPTNeoPreTrainedModel):
    """The bare decoder."""

    def __init__(self, config: ExtGPTNeoConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embed_dropout)
        self.h = nn.ModuleList(ExtGPTNeoBlock(config, i) for i in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value

    def embed(self, **inputs: Tensor | int | None) -> Tensor:
        return self.drop(embed_words_and_positions(self.wte, self.wpe, limit_name="max_position_embeddings", **inputs))

    def masks(self, hidden_states: Tensor, *, attention_mask: object, **inputs: object) -> dict[str, object]:
        if not isinstance(attention_mask, dict):  # `generate` prepares one for each type where the cache is static
            make = {"full_attention": self.causal_mask, "sliding_attention": self.sliding_mask}
            attention_mask = {
                layer_type: make[layer_type](hidden_states, attention_mask=attention_mask, **inputs)
                for layer_type in set(self.config.layer_types)
            }
        return {"attention_mask": attention_mask}

    def blocks(self) -> nn.ModuleList:
        return self.h

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.ln_f(hidden_states)


@positional(*ORDER, "labels", "use_cache", *SWITCHES, "logits_to_keep")
class ExtGPTNeoForCausalLM(CausalLMModel, ExtGPTNeoPreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtGPTNeoConfig) -> None:
        super().__init__(config)
        self.transformer = ExtGPTNeoModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


@positional(*ORDER, "labels", "use_cache", *SWITCHES)
class ExtGPTNeoForSequenceClassification(LastTokenClassificationModel, ExtGPTNeoPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtGPTNeoConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtGPTNeoModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


@positional(*ORDER, "labels", "use_cache", *SWITCHES)
class ExtGPTNeoForTokenClassification(DecoderTokenClassificationModel, ExtGPTNeoPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtGPTNeoConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtGPTNeoModel(config)
        self.dropout = classifier_dropout(config, fallback=0.1)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


@positional(*(name for name in ORDER if name != "past_key_values"), "start_positions", "end_positions", *SWITCHES)
class ExtGPTNeoForQuestionAnswering(DecoderQuestionAnsweringModel, ExtGPTNeoPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtGPTNeoConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtGPTNeoModel(config)
        self.qa_outputs = TaskLinear(config.hidden_size, 2)
        self.post_init()
