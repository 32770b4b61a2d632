"""DistilBERT, a distilled version of BERT (Sanh et al., 2019, https://arxiv.org/abs/1910.01108).

Official checkpoints: distilbert/distilbert-base-uncased, distilbert/distilbert-base-cased-distilled-squad, and every
`model_type: distilbert` file. BERT with half the blocks, without segments and pooler (section 3 of the paper); unlike
BERT it has no dropout after the attention's output projection.

Shapes: B batch, T tokens, C model width, F feed-forward width, V vocabulary.
"""

from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput

from hf_ext.heads import (
    MaskedLMModel,
    MultipleChoiceModel,
    QuestionAnsweringModel,
    SequenceClassificationModel,
    TaskLinear,
    TokenClassificationModel,
)
from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.embeddings import look_up, look_up_positions
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.positions import sinusoids
from hf_ext.modeling import EncoderModel, ExtPreTrainedModel, positional
from hf_ext.models.distilbert.configuration_distilbert import ExtDistilBertConfig

LAYER_NORM_EPS = 1e-12  # no field of the configuration


class ExtDistilBertSinusoids(nn.Embedding):
    """Positions that start as sines and cosines (Vaswani et al., 2017) and are trained from there."""

    def reset_buffers(self) -> None:
        """Fill the table, after the library's own initial values and only where no file has filled it."""
        init.copy_(self.weight, sinusoids(self.num_embeddings, self.embedding_dim, device=self.weight.device))


class ExtDistilBertEmbeddings(nn.Module):
    """Word + position, then LayerNorm and dropout."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__()
        positions = ExtDistilBertSinusoids if config.sinusoidal_pos_embds else nn.Embedding
        self.word_embeddings = nn.Embedding(config.vocab_size, config.dim, padding_idx=config.pad_token_id)
        self.position_embeddings = positions(config.max_position_embeddings, config.dim)
        self.LayerNorm = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, input_ids: Tensor | None, position_ids: Tensor | None, inputs_embeds: Tensor | None, past_length: int
    ) -> Tensor:
        """(B, T) ids or (B, T, C) embeddings -> (B, T, C)"""
        if inputs_embeds is None:
            inputs_embeds = look_up(self.word_embeddings, input_ids, name="input_ids", limit_name="vocab_size")
        positions = look_up_positions(
            self.position_embeddings,
            position_ids,
            tokens=inputs_embeds.shape[1],
            past_length=past_length,
            device=inputs_embeds.device,
            limit_name="max_position_embeddings",
        )
        return self.dropout(self.LayerNorm(inputs_embeds + positions))


class ExtDistilBertAttention(AttentionCore):
    """Multi-head self-attention with its output projection."""

    def __init__(self, config: ExtDistilBertConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.n_heads,
            head_dim=config.dim // config.n_heads,
            is_causal=False,
            dropout=config.attention_dropout,
        )
        self.q_lin = nn.Linear(config.dim, config.dim)
        self.k_lin = nn.Linear(config.dim, config.dim)
        self.v_lin = nn.Linear(config.dim, config.dim)
        self.out_lin = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        mixed, weights = self.attend(self.q_lin(x), self.k_lin(x), self.v_lin(x), **kwargs)
        return self.out_lin(mixed), weights


class ExtDistilBertFeedForward(nn.Module):
    """Dropout(lin2(act(lin1(x)))), C -> F -> C."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.lin1 = nn.Linear(config.dim, config.hidden_dim)
        self.lin2 = nn.Linear(config.hidden_dim, config.dim)
        self.activation = make_activation(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.dropout(self.lin2(self.activation(self.lin1(x))))


class ExtDistilBertBlock(GradientCheckpointingLayer):
    """Self-attention, then feed-forward; each adds and normalises."""

    def __init__(self, config: ExtDistilBertConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = ExtDistilBertAttention(config, layer_idx)
        self.sa_layer_norm = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)
        self.ffn = ExtDistilBertFeedForward(config)
        self.output_layer_norm = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = self.sa_layer_norm(self.attention(x, **kwargs)[0] + x)
        return self.output_layer_norm(self.ffn(x) + x)


class ExtDistilBertTransformer(nn.Module):
    """Holds the blocks under the checkpoint's name; `EncoderModel` runs them."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(ExtDistilBertBlock(config, i) for i in range(config.n_layers))


class ExtDistilBertPreTrainedModel(ExtPreTrainedModel):
    """Base of all DistilBERT classes."""

    config: ExtDistilBertConfig
    base_model_prefix = "distilbert"
    _no_split_modules = ["ExtDistilBertEmbeddings", "ExtDistilBertBlock"]
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids"]  # older official files carry this buffer
    _can_record_outputs = {"hidden_states": ExtDistilBertBlock, "attentions": ExtDistilBertAttention}


@positional("input_ids", "attention_mask", "inputs_embeds", "position_ids")
class ExtDistilBertModel(EncoderModel, ExtDistilBertPreTrainedModel):
    """The bare encoder. `token_type_ids`, which tokenizers of BERT send, are taken and change nothing."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__(config)
        self.embeddings = ExtDistilBertEmbeddings(config)
        self.transformer = ExtDistilBertTransformer(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    def embed(self, *, token_type_ids: Tensor | None = None, **inputs: Tensor | int | None) -> Tensor:
        return self.embeddings(**inputs)

    def blocks(self) -> nn.ModuleList:
        return self.transformer.layer


@positional("input_ids", "attention_mask", "inputs_embeds", "labels", "position_ids")
class ExtDistilBertForMaskedLM(MaskedLMModel, ExtDistilBertPreTrainedModel):
    """Masked language modelling."""

    _tied_weights_keys = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__(config)
        self.activation = make_activation(config.activation)
        self.distilbert = ExtDistilBertModel(config)
        self.vocab_transform = nn.Linear(config.dim, config.dim)
        self.vocab_layer_norm = nn.LayerNorm(config.dim, eps=LAYER_NORM_EPS)
        self.vocab_projector = nn.Linear(config.dim, config.vocab_size)
        self.post_init()

    def transform(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.vocab_layer_norm(self.activation(self.vocab_transform(hidden_states)))

    def hidden_transform(self) -> nn.Module:
        return self.transform

    def get_output_embeddings(self) -> nn.Module:
        return self.vocab_projector

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.vocab_projector = new_embeddings


class ExtDistilBertRowHead:
    """What is read from a row's first token, through a layer that stands for BERT's pooler."""

    def classify(self, outputs: ModelOutput) -> Tensor:
        """Outputs of the base model -> (B, outputs of the classifier)."""
        first = outputs.last_hidden_state[:, 0]
        return self.classifier(self.dropout(self.pre_classifier(first).relu()))


@positional("input_ids", "attention_mask", "inputs_embeds", "labels", "position_ids")
class ExtDistilBertForSequenceClassification(
    ExtDistilBertRowHead, SequenceClassificationModel, ExtDistilBertPreTrainedModel
):
    """Single label, several labels, or regression, on the first token."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.distilbert = ExtDistilBertModel(config)
        self.distilbert.reads_first_token = True
        self.pre_classifier = TaskLinear(config.dim, config.dim)
        self.classifier = TaskLinear(config.dim, config.num_labels)
        self.dropout = nn.Dropout(config.seq_classif_dropout)
        self.post_init()


@positional("input_ids", "attention_mask", "inputs_embeds", "labels", "position_ids")
class ExtDistilBertForMultipleChoice(ExtDistilBertRowHead, MultipleChoiceModel, ExtDistilBertPreTrainedModel):
    """The best of several rows."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__(config)
        self.distilbert = ExtDistilBertModel(config)
        self.distilbert.reads_first_token = True
        self.pre_classifier = TaskLinear(config.dim, config.dim)
        self.classifier = TaskLinear(config.dim, 1)
        self.dropout = nn.Dropout(config.seq_classif_dropout)
        self.post_init()


@positional("input_ids", "attention_mask", "inputs_embeds", "start_positions", "end_positions", "position_ids")
class ExtDistilBertForQuestionAnswering(QuestionAnsweringModel, ExtDistilBertPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__(config)
        self.distilbert = ExtDistilBertModel(config)
        self.qa_outputs = TaskLinear(config.dim, config.num_labels)
        self.dropout = nn.Dropout(config.qa_dropout)
        self.post_init()

    def project_span(self, hidden_states: Tensor) -> Tensor:
        return self.qa_outputs(self.dropout(hidden_states))


@positional("input_ids", "attention_mask", "inputs_embeds", "labels", "position_ids")
class ExtDistilBertForTokenClassification(TokenClassificationModel, ExtDistilBertPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtDistilBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.distilbert = ExtDistilBertModel(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = TaskLinear(config.dim, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))
