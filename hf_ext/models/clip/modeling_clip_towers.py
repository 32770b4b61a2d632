"""The towers of CLIP (Radford et al., 2021, https://arxiv.org/abs/2103.00020, section 2.4): a causal text encoder and a
ViT, pre-LN both. `modeling_clip.py` joins them.

Official checkpoints: openai/clip-vit-base-patch32 and every `model_type: clip` file.

Shapes: B batch, T tokens, I image channels, N patches, C model width, F feed-forward width.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.embeddings import look_up, look_up_positions
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.packing import Packing
from hf_ext.layers.patches import check_image, check_size, embed_patches, interpolate_positions
from hf_ext.modeling import BlockStack, ExtPreTrainedModel, ImageEncoderModel, positional
from hf_ext.models.clip.configuration_clip import ExtCLIPConfig, ExtCLIPTextConfig, ExtCLIPVisionConfig

TowerConfig = ExtCLIPTextConfig | ExtCLIPVisionConfig

LEGACY_EOS = 2  # what files before transformers 4.31 hold
OPENAI_EOS = 49407  # what it is in the vocabulary of all official checkpoints


def linear(width: int, out: int, *, init_std: float, bias: bool = True) -> nn.Linear:
    """A linear layer whose weight starts with its own spread."""
    layer = nn.Linear(width, out, bias=bias)
    layer.init_std = init_std
    return layer


def embedding(rows: int, width: int, *, init_std: float) -> nn.Embedding:
    """An embedding whose rows start with their own spread."""
    layer = nn.Embedding(rows, width)
    layer.init_std = init_std
    return layer


class ExtCLIPTextEmbeddings(nn.Module):
    """Words and learned positions."""

    def __init__(self, config: ExtCLIPTextConfig) -> None:
        super().__init__()
        width, std = config.hidden_size, 0.02 * config.initializer_factor
        self.token_embedding = embedding(config.vocab_size, width, init_std=std)
        self.position_embedding = embedding(config.max_position_embeddings, width, init_std=std)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """(B, T) -> (B, T, C)"""
        words = look_up(self.token_embedding, input_ids, name="input_ids", limit_name="vocab_size")
        return words + look_up_positions(
            self.position_embedding,
            position_ids,
            tokens=input_ids.shape[1],
            past_length=0,
            device=input_ids.device,
            limit_name="max_position_embeddings",
        )


class ExtCLIPVisionEmbeddings(nn.Module):
    """Class token and patches, with learned positions."""

    def __init__(self, config: ExtCLIPVisionConfig) -> None:
        super().__init__()
        self.image_size, self.patch_size, self.grid = config.image_shape, config.patch_shape, config.patch_grid
        width, std = config.hidden_size, config.initializer_range * config.initializer_factor
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.class_embedding_std = width**-0.5 * config.initializer_factor
        self.patch_embedding = nn.Conv2d(
            config.num_channels, width, kernel_size=self.patch_size, stride=self.patch_size, bias=False
        )
        self.patch_embedding.init_std = std
        self.position_embedding = embedding(1 + self.grid[0] * self.grid[1], width, init_std=std)

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool) -> Tensor:
        """(B, I, height, width) -> (B, 1 + N, C)"""
        check_image(pixel_values, channels=self.patch_embedding.in_channels, patch_size=self.patch_size)
        positions = self.position_embedding.weight[None]
        if interpolate_pos_encoding:
            target = tuple(size // patch for size, patch in zip(pixel_values.shape[2:], self.patch_size))
            positions = interpolate_positions(positions, self.grid, target, prefix=1)
        else:
            check_size(pixel_values, self.image_size)
        patches = embed_patches(self.patch_embedding, pixel_values)
        return torch.cat([self.class_embedding.expand(patches.shape[0], 1, -1), patches], dim=1) + positions


class ExtCLIPAttention(AttentionCore):
    """Multi-head self-attention; causal in the text tower."""

    def __init__(self, config: TowerConfig, layer_idx: int, is_causal: bool) -> None:
        width = config.hidden_size
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            head_dim=width // config.num_attention_heads,
            is_causal=is_causal,
            dropout=config.attention_dropout,
        )
        std = width**-0.5 * config.initializer_factor
        for name in ("k_proj", "v_proj", "q_proj"):
            setattr(self, name, linear(width, width, init_std=std * (2 * config.num_hidden_layers) ** -0.5))
        self.out_proj = linear(width, width, init_std=std)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights"""
        mixed, weights = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), **kwargs)
        return self.out_proj(mixed), weights


class ExtCLIPMLP(nn.Module):
    """C -> F -> C."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        width, factor = config.hidden_size, config.initializer_factor
        self.activation_fn = make_activation(config.hidden_act)
        self.fc1 = linear(width, config.intermediate_size, init_std=(2 * width) ** -0.5 * factor)
        std = width**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor
        self.fc2 = linear(config.intermediate_size, width, init_std=std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.fc2(self.activation_fn(self.fc1(x)))


class ExtCLIPEncoderLayer(GradientCheckpointingLayer):
    """One pre-LN block, of either tower."""

    def __init__(self, config: TowerConfig, layer_idx: int, is_causal: bool) -> None:
        super().__init__()
        self.self_attn = ExtCLIPAttention(config, layer_idx, is_causal)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = ExtCLIPMLP(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.self_attn(self.layer_norm1(x), **kwargs)[0]
        return x + self.mlp(self.layer_norm2(x))


class ExtCLIPEncoder(nn.Module):
    """Holds the blocks under the checkpoint's name."""

    def __init__(self, config: TowerConfig, is_causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExtCLIPEncoderLayer(config, i, is_causal) for i in range(config.num_hidden_layers))


class ExtCLIPPreTrainedModel(ExtPreTrainedModel):
    """Base of all CLIP classes."""

    config: ExtCLIPConfig
    base_model_prefix = "clip"
    input_modalities = ("image", "text")
    _no_split_modules = ["ExtCLIPTextEmbeddings", "ExtCLIPVisionEmbeddings", "ExtCLIPEncoderLayer"]
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids"]  # older official files carry these buffers
    _can_record_outputs = {"hidden_states": ExtCLIPEncoderLayer, "attentions": ExtCLIPAttention}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExtCLIPVisionEmbeddings):
            init.normal_(module.class_embedding, mean=0.0, std=module.class_embedding_std)


class ExtCLIPTextPreTrainedModel(ExtCLIPPreTrainedModel):
    """Base of the classes with a text tower only; they read their part of the file of a pair."""

    config: ExtCLIPTextConfig
    base_model_prefix = "text_model"
    input_modalities = ("text",)
    _keys_to_ignore_on_load_unexpected = [
        *ExtCLIPPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^vision_model\.",
        r"^visual_projection\.",
        r"^text_projection\.",
        r"^logit_scale$",
    ]


class ExtCLIPVisionPreTrainedModel(ExtCLIPPreTrainedModel):
    """Base of the classes with a vision tower only; they read their part of the file of a pair."""

    config: ExtCLIPVisionConfig
    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _keys_to_ignore_on_load_unexpected = [
        *ExtCLIPPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^text_model\.",
        r"^text_projection\.",
        r"^visual_projection\.",
        r"^logit_scale$",
    ]


class ExtCLIPTextModel(BlockStack, ExtCLIPTextPreTrainedModel):
    """The text tower, pooled at the end of the text."""

    def __init__(self, config: ExtCLIPTextConfig) -> None:
        super().__init__(config)
        self.embeddings = ExtCLIPTextEmbeddings(config)
        self.encoder = ExtCLIPEncoder(config, is_causal=True)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.token_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.token_embedding = value

    def blocks(self) -> nn.ModuleList:
        return self.encoder.layers

    def eos_places(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B,) index of each row's first end-of-text token.

        Early files say `eos_token_id: 2` though the end of text is 49407, the highest id. Those rows are pooled at
        49407; in a vocabulary that is smaller, at their highest id, as the official class does.

        Raises:
            ValueError: a row has no end of text. On a GPU and in traced graphs, where nothing can be read, such a row
                is pooled at its last token.
        """
        eos = self.config.eos_token_id
        if eos == LEGACY_EOS:
            if self.config.vocab_size <= OPENAI_EOS:
                return input_ids.int().argmax(-1)
            eos = OPENAI_EOS
        found = torch.isin(input_ids, torch.tensor(eos, device=input_ids.device))
        if input_ids.is_cpu and not is_tracing(input_ids) and not found.any(-1).all():
            row = found.any(-1).int().argmin().item()
            raise ValueError(
                f"row {row} of input_ids has no end-of-text token (eos_token_id={self.config.eos_token_id}), at which "
                "the text is pooled. Use the tokenizer of this checkpoint, with truncation=True, or correct "
                "config.eos_token_id."
            )
        return torch.where(found.any(-1), found.int().argmax(-1), input_ids.shape[1] - 1)

    def token_plan(
        self, attention_mask: Tensor | None, eos: Tensor, pooled_only: bool, skip_padding: bool | None, tokens: int
    ) -> Packing | None:
        """The plan for computing only some tokens, or None: real ones where padding is left out, and nothing after the
        end of the text where only the pooled output counts."""
        skip_padding = self.config.skip_padding if skip_padding is None else skip_padding
        mask = None
        if attention_mask is not None:
            if not skip_padding or attention_mask.dim() != 2 or not attention_mask.gather(1, eos[:, None]).all():
                return None
            mask = attention_mask != 0
        if pooled_only:
            until_eos = torch.arange(tokens, device=eos.device) <= eos[:, None]
            mask = until_eos if mask is None else mask & until_eos
        return Packing.from_mask(mask) if mask is not None else None

    @capture_outputs(tie_last_hidden_states=False)
    def run_blocks(self, hidden_states: Tensor, **kwargs: object) -> BaseModelOutputWithPooling:
        """hidden_states (B, T, C) or packed (1, N, C) -> the same shape."""
        for block in self.blocks():
            hidden_states = block(hidden_states, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=self.final_layer_norm(hidden_states))

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        pooled_only: bool = False,
        skip_padding: bool | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPooling:
        """Hidden states after the final norm, and the one at the end of each text.

        Args:
            input_ids: (B, T), each row with an end of text.
            attention_mask: (B, T), 1 at real tokens.
            position_ids: (B or 1, T), default 0..T-1.
            pooled_only: leave `last_hidden_state` out, and with it all tokens after the end of a text: attention is
                causal, so the pooled output does not see them.
            skip_padding: overrides `config.skip_padding` for this call. Left out padding is zero in the outputs.

        Returns:
            `last_hidden_state` (B, T, C), `pooler_output` (B, C), and on request `hidden_states`, `attentions`.

        Raises:
            ValueError: no ids, a row without end of text, more tokens than positions.
        """
        if input_ids is None:
            raise ValueError("input_ids are needed: the end of a text is found by its id.")
        self.check_inputs(input_ids, None, attention_mask, position_ids, None)
        eos = self.eos_places(input_ids)
        hidden_states = self.embeddings(input_ids, position_ids)
        plan = None
        if self.can_pack(**kwargs) and not is_tracing(input_ids):
            plan = self.token_plan(attention_mask, eos, pooled_only, skip_padding, input_ids.shape[1])
        mask = None
        if plan is not None:
            hidden_states = plan.pack(hidden_states)
        else:
            mask = create_causal_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask, past_key_values=None
            )
        self.drop_unused(kwargs, None)
        outputs = self.run_blocks(hidden_states, attention_mask=mask, packing=plan, return_dict=True, **kwargs)
        if plan is not None:
            outputs.last_hidden_state = plan.unpack(outputs.last_hidden_state)
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(x if x is None else plan.unpack(x) for x in outputs.hidden_states)
        rows = torch.arange(eos.shape[0], device=eos.device)
        outputs.pooler_output = outputs.last_hidden_state[rows, eos]
        # Built anew: the pooled output stands second, where the official class has it.
        return BaseModelOutputWithPooling(
            last_hidden_state=None if pooled_only else outputs.last_hidden_state,
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


@positional("pixel_values", "interpolate_pos_encoding")
class ExtCLIPVisionModel(ImageEncoderModel, ExtCLIPVisionPreTrainedModel):
    """The vision tower, pooled at the class token."""

    def __init__(self, config: ExtCLIPVisionConfig) -> None:
        super().__init__(config)
        self.embeddings = ExtCLIPVisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)  # spelled as in the files
        self.encoder = ExtCLIPEncoder(config, is_causal=False)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embedding

    def embed(self, *, pixel_values: Tensor, interpolate_pos_encoding: bool, bool_masked_pos: Tensor | None) -> Tensor:
        if bool_masked_pos is not None:
            raise ValueError("bool_masked_pos was given, but CLIP has no mask token.")
        return self.pre_layrnorm(self.embeddings(pixel_values, interpolate_pos_encoding))

    def blocks(self) -> nn.ModuleList:
        return self.encoder.layers

    def pool(self, hidden_states: Tensor) -> Tensor:
        return self.post_layernorm(hidden_states[:, 0])

    def patches_of(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, 1:]
