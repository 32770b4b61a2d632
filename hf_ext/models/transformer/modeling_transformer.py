"""The Transformer: Attention Is All You Need (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762).

There are no official checkpoints: this is the textbook model, to be trained, with every choice open that was made
since. `ExtTransformerConfig` names the choices, each is a class: of blocks (`BLOCKS`), and of positions, norms and
feed-forwards (`hf_ext.registry`). An encoder, a decoder, or both; a block does not know which model it is in.

Shapes: B batch, S encoder tokens, T tokens of either half, N real encoder tokens, K keys, H heads, C model
width, V vocabulary.
"""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import ModelOutput

from hf_ext.heads import (
    CausalLMModel,
    MaskedLMModel,
    SequenceClassificationModel,
    TaskLinear,
    TokenClassificationModel,
    classifier_dropout,
)
from hf_ext.layers.embeddings import ScaledEmbedding, look_up
from hf_ext.layers.packing import Packing
from hf_ext.layers.position_schemes import hide_later
from hf_ext.modeling import AlibiDecoderModel, BiasedDecoderModel, BiasedEncoderModel, ExtPreTrainedModel, positional
from hf_ext.models.transformer.configuration_transformer import ExtTransformerConfig
from hf_ext.models.transformer.modeling_transformer_blocks import (
    BLOCKS,
    ExtTransformerAttention,
    ExtTransformerBlock,
    ExtTransformerCrossAttention,
    norm_of,
)
from hf_ext.registry import POSITIONS
from hf_ext.seq2seq import EncoderDecoderModel, Seq2SeqLMModel, SequenceDecoder, SequenceEncoder


class ExtTransformerPreTrainedModel(ExtPreTrainedModel):
    """Base of all classes of the textbook model."""

    config: ExtTransformerConfig
    base_model_prefix = "model"
    needs_architecture: str | None = None
    _no_split_modules = [block.__name__ for block in BLOCKS.values()]

    def __init__(self, config: ExtTransformerConfig) -> None:
        if self.needs_architecture not in (None, config.architecture):
            raise ValueError(
                f"{type(self).__name__} needs architecture={self.needs_architecture!r}, the configuration says "
                f"{config.architecture!r}."
            )
        super().__init__(config)

    @property
    def _supports_flash_attn(self) -> bool:
        # Its kernels add nothing to the scores.
        halves = {"encoder": (False,), "decoder": (True,), "encoder-decoder": (False, True)}
        scheme = POSITIONS[self.config.positions]
        return not any(scheme.adds_bias(is_causal) for is_causal in halves[self.config.architecture])


class ExtTransformerHalf:
    """What the encoder and the decoder share: words and positions, blocks, final norm. A mixin before the block
    stack."""

    is_causal_half: bool

    def __init__(self, config: ExtTransformerConfig) -> None:
        super().__init__(config)
        block_class, width = BLOCKS[config.norm_placement], config.hidden_size
        scale = width**0.5 if config.scale_embedding else 1.0
        self.embed_tokens = ScaledEmbedding(config.vocab_size, width, config.pad_token_id, scale=scale)
        if config.scale_embedding:
            self.embed_tokens.init_std = width**-0.5  # scaled words have unit variance, as the sinusoids beside them
        self.positions = POSITIONS[config.positions](
            width=width,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_positions=config.max_position_embeddings,
            is_causal=self.is_causal_half,
            **(config.position_options or {}),
        )
        self.dropout = nn.Dropout(config.dropout)
        options = {"is_causal": self.is_causal_half, "has_encoder": self.attends_to_encoder()}
        self.layers = nn.ModuleList(block_class(config, i, **options) for i in range(self.depth()))
        self.norm = nn.Identity() if block_class.norms_its_output else norm_of(config)
        self.alibi = self.positions.alibi
        self.post_init()

    def depth(self) -> int:
        """How many blocks run: all of them, unless the library exits early for a while (`assistant_early_exit`)."""
        raise NotImplementedError

    def blocks_to_run(self) -> Iterable[nn.Module]:
        return islice(self.layers, self.depth())

    def embed(
        self,
        *,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        past_length: int | Tensor,
        **unused: object,
    ) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.embed_tokens, input_ids, name="input_ids", limit_name="vocab_size")
        return self.dropout(self.positions.embed(inputs_embeds, position_ids, past_length))

    def blocks(self) -> nn.ModuleList:
        return self.layers

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)

    def rotation(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.positions.rotation(position_ids, hidden_states.dtype)

    def adds_bias(self) -> bool:
        return self.positions.has_bias

    def position_bias(self, *, queries: int, keys: int, past_length: int | Tensor, device: torch.device) -> Tensor:
        bias = self.positions.bias(queries, keys, past_length, device)
        return hide_later(bias, past_length) if self.is_causal_half else bias


class ExtTransformerEncoder(ExtTransformerHalf, BiasedEncoderModel, SequenceEncoder, ExtTransformerPreTrainedModel):
    """The encoder."""

    is_causal_half = False
    _can_record_outputs = {"hidden_states": ExtTransformerBlock, "attentions": ExtTransformerAttention}

    def depth(self) -> int:
        return self.config.num_hidden_layers

    def place_arguments(
        self,
        hidden_states: Tensor,
        *,
        position_ids: Tensor | None,
        past_length: int | Tensor,
        padded: Packing | None,
    ) -> dict[str, object]:
        if position_ids is None:
            tokens = hidden_states.shape[1] if padded is None else padded.shape[1]
            position_ids = (torch.arange(tokens, device=hidden_states.device) + past_length)[None]
        if padded is not None:
            position_ids = padded.pack(position_ids.expand(padded.shape))
        return {"rotation": self.rotation(hidden_states, position_ids)}


class ExtTransformerDecoder(
    ExtTransformerHalf, BiasedDecoderModel, SequenceDecoder, AlibiDecoderModel, ExtTransformerPreTrainedModel
):
    """The decoder; beside an encoder every block has cross-attention."""

    is_causal_half = True
    _can_record_outputs = {
        "hidden_states": ExtTransformerBlock,
        "attentions": ExtTransformerAttention,
        "cross_attentions": ExtTransformerCrossAttention,
    }

    def depth(self) -> int:
        return self.config.decoder_layers if self.config.is_encoder_decoder else self.config.num_hidden_layers

    def attends_to_encoder(self) -> bool:
        return self.config.is_encoder_decoder


@positional("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "inputs_embeds")
class ExtTransformerModel(EncoderDecoderModel, ExtTransformerPreTrainedModel):
    """The bare model: an encoder, a decoder, or both, as the modules `encoder` and `decoder`."""

    def __init__(self, config: ExtTransformerConfig) -> None:
        super().__init__(config)
        if config.architecture != "decoder":
            self.encoder = ExtTransformerEncoder(config)
        if config.architecture != "encoder":
            self.decoder = ExtTransformerDecoder(config)
        if config.is_encoder_decoder:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        self.post_init()

    def halves(self) -> list[ExtTransformerHalf]:
        """The encoder, the decoder, or both."""
        return [half for name, half in self.named_children() if name in ("encoder", "decoder")]

    def blocks(self) -> list[nn.Module]:
        """The blocks of all halves."""
        return [block for half in self.halves() for block in half.blocks()]

    def padding_plan(self, attention_mask: Tensor | None, **kwargs: object) -> Packing | None:
        """The encoder's, by which a head leaves out padding too."""
        return self.encoder.padding_plan(attention_mask, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.halves()[0].embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        first, *others = self.halves()
        first.embed_tokens = value
        for half in others:
            if self.config.tie_word_embeddings:
                half.embed_tokens = value
            else:  # two tables, of one size
                self._get_resized_embeddings(half.embed_tokens, value.num_embeddings, mean_resizing=False)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: object
    ) -> ModelOutput:
        """As `EncoderDecoderModel.forward`, or as that of the only half: `EncoderModel`, `DecoderModel`.

        Raises:
            ValueError: inputs that contradict each other, or of a half that the model does not have.
        """
        if self.config.is_encoder_decoder:
            return super().forward(input_ids, attention_mask, **kwargs)
        foreign = [name for name in kwargs if name.startswith("decoder_") or name == "encoder_outputs"]
        if any(kwargs[name] is not None for name in foreign):
            raise ValueError(
                f"{' and '.join(foreign)} given, but a model with architecture={self.config.architecture!r} has one "
                "half, which takes input_ids or inputs_embeds."
            )
        kwargs = {name: value for name, value in kwargs.items() if name not in foreign}
        return self.halves()[0](input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class ExtTransformerVocabularyHead:
    """The output embedding; in training, labels are smoothed as the configuration says. A mixin before the head."""

    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtTransformerConfig) -> None:
        super().__init__(config)
        self.model = ExtTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        first = "decoder" if config.architecture == "decoder" else "encoder"
        self._tied_weights_keys = {"lm_head.weight": f"model.{first}.embed_tokens.weight"}
        self.post_init()

    def loss_over_vocabulary(self, hidden_states: Tensor, labels: Tensor, **kwargs: object) -> Tensor:
        """hidden_states (B, T, C) against aligned labels (B, T) -> scalar."""
        smoothing = self.config.label_smoothing if self.training else 0.0
        return super().loss_over_vocabulary(hidden_states, labels, **{"label_smoothing": smoothing, **kwargs})


class ExtTransformerForConditionalGeneration(
    ExtTransformerVocabularyHead, Seq2SeqLMModel, ExtTransformerPreTrainedModel, GenerationMixin
):
    """Generation of one text from another, by an encoder-decoder: the paper's translator."""

    needs_architecture = "encoder-decoder"


class ExtTransformerForCausalLM(
    ExtTransformerVocabularyHead, CausalLMModel, ExtTransformerPreTrainedModel, GenerationMixin
):
    """Next-token prediction by a decoder."""

    needs_architecture = "decoder"
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}


class ExtTransformerForMaskedLM(ExtTransformerVocabularyHead, MaskedLMModel, ExtTransformerPreTrainedModel):
    """Masked tokens, filled in by an encoder."""

    needs_architecture = "encoder"


class ExtTransformerForSequenceClassification(SequenceClassificationModel, ExtTransformerPreTrainedModel):
    """A label per row, read by an encoder from its first token: padding belongs on the right."""

    needs_architecture = "encoder"

    def __init__(self, config: ExtTransformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ExtTransformerModel(config)
        self.model.encoder.reads_first_token = True
        self.dropout = classifier_dropout(config, fallback=config.dropout)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.last_hidden_state[:, 0]))


class ExtTransformerForTokenClassification(TokenClassificationModel, ExtTransformerPreTrainedModel):
    """A label per token of an encoder."""

    needs_architecture = "encoder"

    def __init__(self, config: ExtTransformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ExtTransformerModel(config)
        self.dropout = classifier_dropout(config, fallback=config.dropout)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))
