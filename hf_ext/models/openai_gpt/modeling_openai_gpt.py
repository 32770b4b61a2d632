"""GPT: Improving Language Understanding by Generative Pre-Training (Radford et al., 2018,
https://cdn.openai.com/research-covers/language-unsupervised/language_understanding_paper.pdf).

Official checkpoints: openai-community/openai-gpt, and every `model_type: openai-gpt` file.
The decoder of the original Transformer without its encoder: post-LN blocks, so that no norm follows the last one, with
learned positions and one fused projection for queries, keys and values. All projections are `Conv1D`: linear layers
whose weight is stored (inputs, outputs), as the first release had them.

Departure from the official class: keys and values are cached, where that one computes the whole text for every token.

Shapes: B batch, T tokens, K keys, H heads, C model width, F feed-forward width.
"""

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ext.heads import CausalLMModel, DoubleHeadsModel, LastTokenClassificationModel, SequenceSummary
from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.conv1d import Conv1D
from hf_ext.layers.embeddings import embed_words_and_positions
from hf_ext.layers.feedforward import make_activation
from hf_ext.modeling import DecoderModel, ExtPreTrainedModel, positional
from hf_ext.models.openai_gpt.configuration_openai_gpt import ACTIVATIONS, ExtOpenAIGPTConfig

ORDER = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
OUTPUTS = ("output_attentions", "output_hidden_states", "return_dict")


def projection(inputs: int, outputs: int) -> Conv1D:
    """inputs -> outputs, with the initial values of section 4.1, N(0, 0.02): the official class draws projections from
    that distribution, whatever `initializer_range` says of the embeddings."""
    layer = Conv1D(outputs, inputs)
    layer.init_std = 0.02
    return layer


class ExtOpenAIGPTAttention(AttentionCore):
    """Multi-head causal self-attention."""

    def __init__(self, config: ExtOpenAIGPTConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.n_head,
            head_dim=config.n_embd // config.n_head,
            is_causal=True,
            dropout=config.attn_pdrop,
        )
        self.c_attn = projection(config.n_embd, 3 * config.n_embd)
        self.c_proj = projection(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(*self.c_attn(x).chunk(3, dim=-1), **kwargs)
        return self.resid_dropout(self.c_proj(mixed)), weights


class ExtOpenAIGPTMLP(nn.Module):
    """C -> F -> C, F four times C."""

    def __init__(self, config: ExtOpenAIGPTConfig) -> None:
        super().__init__()
        self.c_fc = projection(config.n_embd, 4 * config.n_embd)
        self.c_proj = projection(4 * config.n_embd, config.n_embd)
        self.act = make_activation(ACTIVATIONS[config.afn])
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class ExtOpenAIGPTBlock(GradientCheckpointingLayer):
    """Post-LN block: norm(x + attention(x)), norm(x + mlp(x))."""

    def __init__(self, config: ExtOpenAIGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn = ExtOpenAIGPTAttention(config, layer_idx)
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = ExtOpenAIGPTMLP(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = self.ln_1(x + self.attn(x, **kwargs)[0])
        return self.ln_2(x + self.mlp(x))


class ExtOpenAIGPTPreTrainedModel(ExtPreTrainedModel):
    """Base of all GPT classes."""

    config: ExtOpenAIGPTConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["ExtOpenAIGPTBlock"]
    # Buffers that official files carry: the causal mask of every layer, and the positions.
    _keys_to_ignore_on_load_unexpected = [r"h\.\d+\.attn\.bias$", r"position_ids$"]
    _can_record_outputs = {"hidden_states": ExtOpenAIGPTBlock, "attentions": ExtOpenAIGPTAttention}


@positional(*ORDER, *OUTPUTS)
class ExtOpenAIGPTModel(DecoderModel, ExtOpenAIGPTPreTrainedModel):
    """The bare decoder."""

    def __init__(self, config: ExtOpenAIGPTConfig) -> None:
        super().__init__(config)
        self.tokens_embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions_embed = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(ExtOpenAIGPTBlock(config, i) for i in range(config.n_layer))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens_embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens_embed = value

    def embed(self, **inputs: Tensor | int | None) -> Tensor:
        return self.drop(
            embed_words_and_positions(self.tokens_embed, self.positions_embed, limit_name="n_positions", **inputs)
        )

    def blocks(self) -> nn.ModuleList:
        return self.h


@positional(*ORDER, "labels", *OUTPUTS, "logits_to_keep")
class ExtOpenAIGPTLMHeadModel(CausalLMModel, ExtOpenAIGPTPreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "transformer.tokens_embed.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtOpenAIGPTConfig) -> None:
        super().__init__(config)
        self.transformer = ExtOpenAIGPTModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # tells Trainer that labels are shifted when it counts them
        self.post_init()


@positional(*ORDER, "mc_token_ids", "labels", "mc_labels", *OUTPUTS)
class ExtOpenAIGPTDoubleHeadsModel(DoubleHeadsModel, ExtOpenAIGPTPreTrainedModel):
    """Next-token prediction and multiple choice."""

    # This way round, because the official files of this class hold the weight under the head's name.
    _tied_weights_keys = {"transformer.tokens_embed.weight": "lm_head.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ExtOpenAIGPTConfig) -> None:
        super().__init__(config)
        config.num_labels = 1  # one score per choice
        self.transformer = ExtOpenAIGPTModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.multiple_choice_head = SequenceSummary(config)
        self.loss_type = "ForCausalLM"
        self.post_init()


@positional(*ORDER, "labels", *OUTPUTS)
class ExtOpenAIGPTForSequenceClassification(LastTokenClassificationModel, ExtOpenAIGPTPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtOpenAIGPTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtOpenAIGPTModel(config)
        self.score = nn.Linear(config.n_embd, config.num_labels, bias=False)
        self.post_init()
