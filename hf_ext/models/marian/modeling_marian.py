"""Marian: Fast Neural Machine Translation in C++ (Junczys-Dowmunt et al., 2018, https://arxiv.org/abs/1804.00344).

Official checkpoints: Helsinki-NLP/opus-mt-en-de and the other OPUS-MT models, and every `model_type: marian` file. The
encoder-decoder of the 2017 paper as it is deployed: post-LN blocks, which are those of BART, sinusoidal positions, one
table of words for both languages and the head, or a table for each language.

Shapes: B batch, S encoder tokens, T tokens of either half, C model width, V words to read, W words to write.
"""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init

from hf_ext.layers.embeddings import ScaledEmbedding, look_up, look_up_positions
from hf_ext.layers.positions import placed_as, sinusoids
from hf_ext.modeling import ExtPreTrainedModel
from hf_ext.models.bart.modeling_bart import (
    ExtBartAttention,
    ExtBartCrossAttention,
    ExtBartDecoderLayer,
    ExtBartEncoderLayer,
)
from hf_ext.models.marian.configuration_marian import ExtMarianConfig
from hf_ext.seq2seq import (
    EncoderDecoderModel,
    FinalLogitsBias,
    Seq2SeqLMModel,
    SequenceDecoder,
    SequenceDecoderLMModel,
    SequenceEncoder,
)


class ExtMarianPositions(nn.Embedding):
    """Sines in the first half of the columns and cosines in the second; not trained. Most files do not hold them."""

    is_fixed = True

    def __init__(self, positions: int, width: int) -> None:
        super().__init__(positions, width, _freeze=True)

    def reset_buffers(self) -> None:
        """Fill the table, where no file has filled it."""
        table = sinusoids(self.num_embeddings, self.embedding_dim, device=self.weight.device)
        init.copy_(self.weight, placed_as(self.weight, torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)))


class ExtMarianPreTrainedModel(ExtPreTrainedModel):
    """Base of all Marian classes."""

    config: ExtMarianConfig
    base_model_prefix = "model"
    _no_split_modules = ["ExtBartEncoderLayer", "ExtBartDecoderLayer"]


class ExtMarianHalf:
    """What the encoder and the decoder share: words + positions, then dropout; a list of blocks. A mixin before the
    block stack."""

    def __init__(self, config: ExtMarianConfig) -> None:
        super().__init__(config)
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_positions = ExtMarianPositions(config.max_position_embeddings, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

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
            inputs_embeds = look_up(self.embed_tokens, input_ids, name="input_ids", limit_name=self.limit_name)
        positions = look_up_positions(
            self.embed_positions,
            position_ids,
            tokens=inputs_embeds.shape[1],
            past_length=past_length,
            device=inputs_embeds.device,
            limit_name="max_position_embeddings",
        )
        return self.dropout(inputs_embeds + positions)

    def blocks(self) -> nn.ModuleList:
        return self.layers


class ExtMarianEncoder(ExtMarianHalf, SequenceEncoder, ExtMarianPreTrainedModel):
    """The encoder. Embeddings that are passed in are scaled already, as its table gives them."""

    limit_name = "vocab_size"
    _can_record_outputs = {"hidden_states": ExtBartEncoderLayer, "attentions": ExtBartAttention}

    def __init__(self, config: ExtMarianConfig) -> None:
        super().__init__(config)
        self.layer_drop = config.encoder_layerdrop
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.d_model, config.pad_token_id, scale=self.scale)
        self.layers = nn.ModuleList(ExtBartEncoderLayer(config, i) for i in range(config.encoder_layers))
        self.post_init()


class ExtMarianDecoder(ExtMarianHalf, SequenceDecoder, ExtMarianPreTrainedModel):
    """The decoder. Embeddings that are passed in are scaled here, as in the official class."""

    limit_name = "decoder_vocab_size"
    _can_record_outputs = {
        "hidden_states": ExtBartDecoderLayer,
        "attentions": ExtBartAttention,
        "cross_attentions": ExtBartCrossAttention,
    }

    def __init__(self, config: ExtMarianConfig) -> None:
        super().__init__(config)
        self.layer_drop = config.decoder_layerdrop
        self.embed_tokens = nn.Embedding(config.decoder_vocab_size, config.d_model, config.pad_token_id)
        self.layers = nn.ModuleList(ExtBartDecoderLayer(config, i) for i in range(config.decoder_layers))
        self.post_init()

    def embed(self, *, input_ids: Tensor | None, inputs_embeds: Tensor | None, **kwargs: object) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.embed_tokens, input_ids, name="input_ids", limit_name=self.limit_name)
        return super().embed(input_ids=None, inputs_embeds=inputs_embeds * self.scale, **kwargs)


class ExtMarianModel(EncoderDecoderModel, ExtMarianPreTrainedModel):
    """The bare encoder-decoder."""

    def __init__(self, config: ExtMarianConfig) -> None:
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            self._tied_weights_keys = {
                "decoder.embed_tokens.weight": "shared.weight",
                "encoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = ExtMarianEncoder(config)
        self.decoder = ExtMarianDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.config.decoder_vocab_size = value.num_embeddings
            for table in (self.shared, self.decoder.embed_tokens):
                if self.config.tie_word_embeddings:  # one tensor in modules of their own: they scale it differently
                    table.weight, table.num_embeddings = value.weight, value.num_embeddings
                else:
                    self._get_resized_embeddings(table, value.num_embeddings, mean_resizing=False)

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Module:
        """Another size for the words to write, where they have a table of their own.

        Raises:
            ValueError: one table serves both languages.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError(
                "share_encoder_decoder_embeddings is True, so there is one table: call resize_token_embeddings."
            )
        self._get_resized_embeddings(self.decoder.embed_tokens, new_num_tokens)
        self.config.decoder_vocab_size = new_num_tokens
        return self.decoder.embed_tokens


class ExtMarianMTModel(FinalLogitsBias, Seq2SeqLMModel, ExtMarianPreTrainedModel, GenerationMixin):
    """Translation."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    _keys_to_ignore_on_load_missing = [
        "final_logits_bias",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    ]
    _keys_to_ignore_on_save = ["model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"]
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtMarianConfig) -> None:
        super().__init__(config)
        self.model = ExtMarianModel(config)
        if config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
        self.final_logits_bias = nn.Buffer(torch.zeros(1, config.decoder_vocab_size))
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=False)
        self.post_init()

    def _resize_token_embeddings(self, *args: object, **kwargs: object) -> nn.Module:
        """As the library's; the head is of the words to write, which may not be those that are resized."""
        if self.config.share_encoder_decoder_embeddings:
            return super()._resize_token_embeddings(*args, **kwargs)
        return self.model._resize_token_embeddings(*args, **kwargs)

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Module:
        """As `ExtMarianModel.resize_decoder_token_embeddings`, and the head with it."""
        embeddings = self.model.resize_decoder_token_embeddings(new_num_tokens)
        self.lm_head = self._get_resized_lm_head(self.lm_head, new_num_tokens)
        self.tie_weights()
        self.resize_logits_bias(new_num_tokens)
        return embeddings


class ExtMarianDecoderWrapper(ExtMarianPreTrainedModel):
    """Gives the decoder on its own the name that it has in the files of the whole model."""

    def __init__(self, config: ExtMarianConfig) -> None:
        super().__init__(config)
        self.decoder = ExtMarianDecoder(config)
        self.post_init()

    def forward(self, *args: object, **kwargs: object) -> object:
        """As the decoder's."""
        return self.decoder(*args, **kwargs)

    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks."""
        return self.decoder.blocks()


class ExtMarianForCausalLM(SequenceDecoderLMModel, ExtMarianPreTrainedModel, GenerationMixin):
    """The decoder on its own, with a vocabulary head."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtMarianConfig) -> None:
        config = copy.deepcopy(config)  # the caller's may be shared with a model that has both halves
        config.is_decoder, config.is_encoder_decoder = True, False
        super().__init__(config)
        self.model = ExtMarianDecoderWrapper(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.embed_tokens = value
        self.config.decoder_vocab_size = value.num_embeddings
