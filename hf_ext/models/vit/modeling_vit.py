"""An Image is Worth 16x16 Words (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929).

Official checkpoints: google/vit-base-patch16-224, facebook/dino-vits16 and every `model_type: vit` file. Pre-LN blocks
over patches of an image, a class token before them, learned positions.

The stock class has other names in memory than in its files; ours has those of the files.

Shapes: B batch, I image channels, N patches, P prefix tokens (class, ...), T = P + N tokens, C model width, F
feed-forward width.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput

from hf_ext.heads import ImageClassificationModel, MaskedImageModel, PixelDecoder, image_classifier
from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.patches import PatchEmbedding, check_size, interpolate_positions, mask_patches
from hf_ext.modeling import ExtPreTrainedModel, ImageEncoderModel
from hf_ext.models.vit.configuration_vit import ExtViTConfig


class ExtViTEmbeddings(nn.Module):
    """Class token and patches, with learned positions.

    Args:
        config: the configuration.
        use_mask_token: whether patches can be masked.
    """

    num_prefix_tokens = 1

    def __init__(self, config: ExtViTConfig, use_mask_token: bool = False) -> None:
        super().__init__()
        self.image_size, self.grid = config.image_shape, config.patch_grid
        tokens = self.num_prefix_tokens + self.grid[0] * self.grid[1]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if use_mask_token else None
        self.patch_embeddings = PatchEmbedding(
            channels=config.num_channels, width=config.hidden_size, patch_size=config.patch_shape
        )
        self.position_embeddings = nn.Parameter(torch.zeros(1, tokens, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def prefix_tokens(self) -> tuple[Tensor, ...]:
        """What stands before the patches, P tensors (1, 1, C)."""
        return (self.cls_token,)

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None, interpolate_pos_encoding: bool) -> Tensor:
        """(B, I, height, width), (B, N) -> (B, T, C)"""
        patches = mask_patches(self.patch_embeddings(pixel_values), bool_masked_pos, self.mask_token)
        prefix = (token.expand(patches.shape[0], -1, -1) for token in self.prefix_tokens())
        positions = self.position_embeddings
        if interpolate_pos_encoding:
            target = self.patch_embeddings.grid_of(pixel_values)
            positions = interpolate_positions(positions, self.grid, target, prefix=self.num_prefix_tokens)
        else:
            check_size(pixel_values, self.image_size)
        return self.dropout(torch.cat([*prefix, patches], dim=1) + positions)


class ExtViTSelfAttention(AttentionCore):
    """Multi-head self-attention."""

    def __init__(self, config: ExtViTConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            is_causal=False,
            dropout=config.attention_probs_dropout_prob,
        )
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        return self.attend(self.query(x), self.key(x), self.value(x), **kwargs)


class ExtViTDense(nn.Module):
    """Dropout(dense(x)): how both sub-layers of a block end."""

    def __init__(self, config: ExtViTConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, C)"""
        return self.dropout(self.dense(x))


class ExtViTAttention(nn.Module):
    """Attention and its output projection, under the checkpoint's names."""

    def __init__(self, config: ExtViTConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = ExtViTSelfAttention(config, layer_idx)
        self.output = ExtViTDense(config, config.hidden_size)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        return self.output(self.attention(x, **kwargs)[0])


class ExtViTIntermediate(nn.Module):
    """First half of the feed-forward, C -> F."""

    def __init__(self, config: ExtViTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = make_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))


class ExtViTLayer(GradientCheckpointingLayer):
    """One pre-LN block (figure 1 of the paper)."""

    def __init__(self, config: ExtViTConfig, layer_idx: int) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = ExtViTAttention(config, layer_idx)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = ExtViTIntermediate(config)
        self.output = ExtViTDense(config, config.intermediate_size)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.attention(self.layernorm_before(x), **kwargs)
        return x + self.output(self.intermediate(self.layernorm_after(x)))


class ExtViTEncoder(nn.Module):
    """Holds the blocks under the checkpoint's name; `ImageEncoderModel` runs them."""

    def __init__(self, config: ExtViTConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(ExtViTLayer(config, i) for i in range(config.num_hidden_layers))


class ExtViTPooler(nn.Module):
    """activation(dense(class token)), of the pre-training on ImageNet-21k."""

    def __init__(self, config: ExtViTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.pooler_output_size)
        self.activation = make_activation(config.pooler_act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, pooler_output_size)"""
        return self.activation(self.dense(hidden_states[:, 0]))


class ExtViTPreTrainedModel(ExtPreTrainedModel):
    """Base of all ViT classes."""

    config: ExtViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["ExtViTEmbeddings", "ExtViTLayer"]
    _can_record_outputs = {"hidden_states": ExtViTLayer, "attentions": ExtViTSelfAttention}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExtViTEmbeddings):
            init.trunc_normal_(module.position_embeddings, mean=0.0, std=self.config.initializer_range)
            init.trunc_normal_(module.cls_token, mean=0.0, std=self.config.initializer_range)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)


class ExtViTModel(ImageEncoderModel, ExtViTPreTrainedModel):
    """The bare encoder.

    Args:
        config: the configuration.
        add_pooling_layer: whether to build the pooler.
        use_mask_token: whether patches can be masked.
    """

    embeddings_class = ExtViTEmbeddings

    def __init__(self, config: ExtViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.embeddings = self.embeddings_class(config, use_mask_token=use_mask_token)
        self.encoder = ExtViTEncoder(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = ExtViTPooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embeddings

    def embed(self, **inputs: Tensor | bool | None) -> Tensor:
        return self.embeddings(**inputs)

    def blocks(self) -> nn.ModuleList:
        return self.encoder.layer

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.layernorm(hidden_states)

    def pool(self, hidden_states: Tensor) -> Tensor | None:
        return self.pooler(hidden_states) if self.pooler is not None else None

    def patches_of(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, self.embeddings.num_prefix_tokens :]


class ExtViTForMaskedImageModeling(MaskedImageModel, ExtViTPreTrainedModel):
    """Masked patches are filled in, pixel by pixel (SimMIM, Xie et al., 2021, https://arxiv.org/abs/2111.09886)."""

    def __init__(self, config: ExtViTConfig) -> None:
        super().__init__(config)
        self.vit = ExtViTModel(config, add_pooling_layer=False, use_mask_token=True)
        self.decoder = PixelDecoder(
            width=config.hidden_size, channels=config.num_channels, stride=config.encoder_stride
        )
        self.post_init()


class ExtViTForImageClassification(ImageClassificationModel, ExtViTPreTrainedModel):
    """Single label, several labels, or regression, on the class token."""

    def __init__(self, config: ExtViTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = ExtViTModel(config, add_pooling_layer=False)
        self.classifier = image_classifier(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(outputs.last_hidden_state[:, 0])
