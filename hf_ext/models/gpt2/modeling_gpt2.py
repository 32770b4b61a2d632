"""GPT-2: Language Models are Unsupervised Multitask Learners (Radford et al., 2019,
https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf).

Official checkpoints: openai-community/gpt2 to gpt2-xl, distilbert/distilgpt2, and every `model_type: gpt2` file.
Pre-LN blocks, learned positions, one fused projection for queries, keys and values. All projections are `Conv1D`:
linear layers whose weight is stored (inputs, outputs), as the first release had them.

Shapes: B batch, T tokens, S encoder tokens, Q queries, K keys, H heads, D head width, C model width, F feed-forward
width.
"""

from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ext.heads import (
    CrossAttendingLMModel,
    DecoderQuestionAnsweringModel,
    DecoderTokenClassificationModel,
    DoubleHeadsModel,
    LastTokenClassificationModel,
    SequenceSummary,
    TaskLinear,
    classifier_dropout,
)
from hf_ext.layers.attention import AttentionCore, CrossAttentionCore, upcast_attention
from hf_ext.layers.conv1d import Conv1D
from hf_ext.layers.embeddings import embed_words_and_positions
from hf_ext.layers.feedforward import make_activation
from hf_ext.modeling import DecoderModel, ExtPreTrainedModel, positional
from hf_ext.models.gpt2.configuration_gpt2 import ExtGPT2Config

ORDER = ("input_ids", "past_key_values", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


def residual_projection(config: ExtGPT2Config, width: int) -> Conv1D:
    """width -> C at the end of a branch; its initial values are scaled by 1 / sqrt(number of branches) (section 2.3),
    counted as two per block."""
    projection = Conv1D(config.n_embd, width)
    projection.init_std = config.initializer_range / max(2 * config.n_layer, 1) ** 0.5
    return projection


def attention_options(config: ExtGPT2Config, layer_idx: int) -> dict[str, object]:
    """What self- and cross-attention share."""
    head_dim = config.n_embd // config.n_head
    scaling = head_dim**-0.5 if config.scale_attn_weights else 1.0
    return {
        "config": config,
        "layer_idx": layer_idx,
        "num_heads": config.n_head,
        "head_dim": head_dim,
        "dropout": config.attn_pdrop,
        "scaling": scaling / (layer_idx + 1) if config.scale_attn_by_inverse_layer_idx else scaling,
    }


class ExtGPT2Attention(AttentionCore):
    """Multi-head causal self-attention."""

    def __init__(self, config: ExtGPT2Config, layer_idx: int) -> None:
        super().__init__(is_causal=True, **attention_options(config, layer_idx))
        if config.reorder_and_upcast_attn:
            self.eager_attention = upcast_attention
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = residual_projection(config, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(*self.c_attn(x).chunk(3, dim=-1), **kwargs)
        return self.resid_dropout(self.c_proj(mixed)), weights


class ExtGPT2CrossAttention(CrossAttentionCore):
    """Attention over an encoder's output."""

    def __init__(self, config: ExtGPT2Config, layer_idx: int) -> None:
        super().__init__(is_causal=False, **attention_options(config, layer_idx))
        if config.reorder_and_upcast_attn:
            self.eager_attention = upcast_attention
        self.c_attn = Conv1D(2 * config.n_embd, config.n_embd)
        self.q_attn = Conv1D(config.n_embd, config.n_embd)
        self.c_proj = residual_projection(config, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.c_attn(encoder_hidden_states).chunk(2, dim=-1)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C), (B, S, C) -> (B, T, C), weights (B, H, T, S) or None"""
        mixed, weights = self.attend_encoder(self.q_attn(x), encoder_hidden_states, **kwargs)
        return self.resid_dropout(self.c_proj(mixed)), weights


class ExtGPT2MLP(nn.Module):
    """C -> F -> C."""

    def __init__(self, config: ExtGPT2Config) -> None:
        super().__init__()
        inner_width = 4 * config.n_embd if config.n_inner is None else config.n_inner
        self.c_fc = Conv1D(inner_width, config.n_embd)
        self.c_proj = residual_projection(config, inner_width)
        self.act = make_activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class ExtGPT2Block(GradientCheckpointingLayer):
    """Pre-LN block: x + attention(norm(x)), x + crossattention(norm(x)) where there is an encoder, x + mlp(norm(x))."""

    def __init__(self, config: ExtGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = ExtGPT2Attention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if config.add_cross_attention:
            self.crossattention = ExtGPT2CrossAttention(config, layer_idx)
            self.ln_cross_attn = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = ExtGPT2MLP(config)

    def forward(
        self,
        x: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.attn(self.ln_1(x), past_key_values=past_key_values, **kwargs)[0]
        if encoder_hidden_states is not None:
            x = (
                x
                + self.crossattention(
                    self.ln_cross_attn(x),
                    encoder_hidden_states,
                    attention_mask=encoder_attention_mask,
                    past_key_values=past_key_values,
                )[0]
            )
        return x + self.mlp(self.ln_2(x))


class ExtGPT2PreTrainedModel(ExtPreTrainedModel):
    """Base of all GPT-2 classes."""

    config: ExtGPT2Config
    base_model_prefix = "transformer"
    _no_split_modules = ["ExtGPT2Block"]
    # Older official files hold the causal mask of every layer.
    _keys_to_ignore_on_load_unexpected = [r"h\.\d+\.(attn|crossattention)\.(masked_)?bias$"]
    _can_record_outputs = {
        "hidden_states": ExtGPT2Block,
        "attentions": ExtGPT2Attention,
        "cross_attentions": ExtGPT2CrossAttention,
    }


@positional(*ORDER, "encoder_hidden_states", "encoder_attention_mask")
class ExtGPT2Model(DecoderModel, ExtGPT2PreTrainedModel):
    """The bare decoder."""

    def __init__(self, config: ExtGPT2Config) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(ExtGPT2Block(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value

    def embed(self, **inputs: Tensor | int | None) -> Tensor:
        return self.drop(embed_words_and_positions(self.wte, self.wpe, limit_name="n_positions", **inputs))

    def blocks(self) -> nn.ModuleList:
        return self.h

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.ln_f(hidden_states)


@positional(*ORDER)
class ExtGPT2LMHeadModel(CrossAttendingLMModel, ExtGPT2PreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ExtGPT2Config) -> None:
        super().__init__(config)
        self.transformer = ExtGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # tells Trainer that labels are shifted when it counts them
        self.post_init()

    def wants_cache(self, use_cache: bool | None, labels: Tensor | None) -> bool | None:
        return use_cache


@positional(*ORDER)
class ExtGPT2DoubleHeadsModel(DoubleHeadsModel, ExtGPT2PreTrainedModel, GenerationMixin):
    """Next-token prediction and multiple choice."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ExtGPT2Config) -> None:
        super().__init__(config)
        config.num_labels = 1  # one score per choice
        self.transformer = ExtGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.multiple_choice_head = SequenceSummary(config)
        self.loss_type = "ForCausalLM"
        self.post_init()


@positional(*ORDER)
class ExtGPT2ForSequenceClassification(LastTokenClassificationModel, ExtGPT2PreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtGPT2Config) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtGPT2Model(config)
        self.score = nn.Linear(config.n_embd, config.num_labels, bias=False)
        self.post_init()


@positional(*ORDER)
class ExtGPT2ForTokenClassification(DecoderTokenClassificationModel, ExtGPT2PreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtGPT2Config) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtGPT2Model(config)
        self.dropout = classifier_dropout(config, fallback=0.1)
        self.classifier = TaskLinear(config.n_embd, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


@positional(*(name for name in ORDER if name != "past_key_values"), "start_positions", "end_positions")
class ExtGPT2ForQuestionAnswering(DecoderQuestionAnsweringModel, ExtGPT2PreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtGPT2Config) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtGPT2Model(config)
        self.qa_outputs = TaskLinear(config.n_embd, 2)
        self.post_init()
