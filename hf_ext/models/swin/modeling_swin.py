"""Swin Transformer: Hierarchical Vision Transformer using Shifted Windows (Liu et al., 2021,
https://arxiv.org/abs/2103.14030).

Official checkpoints: microsoft/swin-tiny-patch4-window7-224 and every `model_type: swin` file. Pre-LN blocks over
windows of the grid of patches; between the stages four neighbours become one token of twice the width.

The stock class has other names in memory than in its files; ours has those of the files.

Shapes: B batch, I image channels, h and w rows and columns of the grid, T = h * w tokens, M windows, Q tokens of a
window, C width of the stage, F feed-forward width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, ImageClassifierOutput, MaskedImageModelingOutput, ModelOutput
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_ext.heads import ImageClassificationModel, MaskedImageModel, PixelDecoder, image_classifier
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.patches import (
    PaddedPatchEmbedding,
    PatchMerging,
    check_size,
    interpolate_positions,
    mask_patches,
)
from hf_ext.layers.patterns.shifted_windows import ShiftedWindowAttentionCore, SortedWindows, Windows
from hf_ext.layers.residual import DropPath
from hf_ext.modeling import ExtPreTrainedModel
from hf_ext.models.swin.configuration_swin import ExtSwinConfig

Size = tuple[int, int]  # rows and columns


@dataclass
class ExtSwinModelOutput(ModelOutput):
    """`last_hidden_state` (B, T, C), `pooler_output` (B, C); on request `hidden_states`, (B, T, C) after the embedding
    and after each stage, `attentions` (B * M, H, Q, Q) of the last block of each stage, and `reshaped_hidden_states`
    (B, C, h, w)."""

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    reshaped_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class ExtSwinImageClassifierOutput(ImageClassifierOutput):
    """As the library's, with the hidden states in both layouts."""

    reshaped_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class ExtSwinMaskedImageModelingOutput(MaskedImageModelingOutput):
    """As the library's, with the hidden states in both layouts."""

    reshaped_hidden_states: tuple[Tensor, ...] | None = None


def as_map(x: Tensor, grid: Size) -> Tensor:
    """(B, h * w, C) -> (B, C, h, w)"""
    return x.transpose(1, 2).unflatten(2, grid).contiguous()


class ExtSwinEmbeddings(nn.Module):
    """Patches, normalised; with learned positions where the configuration says so.

    Args:
        config: the configuration.
        use_mask_token: whether patches can be masked.
    """

    def __init__(self, config: ExtSwinConfig, use_mask_token: bool = False) -> None:
        super().__init__()
        self.image_size, self.grid = config.image_shape, config.patch_grid
        width = config.embed_dim
        self.patch_embeddings = PaddedPatchEmbedding(
            channels=config.num_channels, width=width, patch_size=config.patch_shape
        )
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width)) if use_mask_token else None
        self.position_embeddings = None
        if config.use_absolute_embeddings:
            self.position_embeddings = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], width))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, pixel_values: Tensor, bool_masked_pos: Tensor | None, interpolate_pos_encoding: bool
    ) -> tuple[Tensor, Size]:
        """(B, I, height, width), (B, T) -> (B, T, C), h and w"""
        x = mask_patches(self.norm(self.patch_embeddings(pixel_values)), bool_masked_pos, self.mask_token)
        grid = self.patch_embeddings.grid_of(pixel_values)
        if self.position_embeddings is not None:
            positions = self.position_embeddings
            if interpolate_pos_encoding:
                positions = interpolate_positions(positions, self.grid, grid)
            else:
                check_size(pixel_values, self.image_size)
            x = x + positions
        return self.dropout(x), grid


class ExtSwinSelfAttention(ShiftedWindowAttentionCore):
    """Multi-head self-attention inside windows."""

    def __init__(self, config: ExtSwinConfig, width: int, num_heads: int) -> None:
        super().__init__(
            config=config,
            layer_idx=0,  # there is no cache
            num_heads=num_heads,
            head_dim=width // num_heads,
            dropout=config.attention_probs_dropout_prob,
            window_side=config.window_size,
        )
        self.query = nn.Linear(width, width, bias=config.qkv_bias)
        self.key = nn.Linear(width, width, bias=config.qkv_bias)
        self.value = nn.Linear(width, width, bias=config.qkv_bias)

    def forward(self, x: Tensor, windows: Windows, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        return self.attend_windows(self.query(x), self.key(x), self.value(x), windows, **kwargs)


class ExtSwinDense(nn.Module):
    """Dropout(dense(x)): how both sub-layers of a block end."""

    def __init__(self, config: ExtSwinConfig, width: int, out: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, out)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., C)"""
        return self.dropout(self.dense(x))


class ExtSwinAttention(nn.Module):
    """Attention and its output projection, under the checkpoint's names."""

    def __init__(self, config: ExtSwinConfig, width: int, num_heads: int) -> None:
        super().__init__()
        self.self = ExtSwinSelfAttention(config, width, num_heads)
        self.output = ExtSwinDense(config, width, width)

    def forward(self, x: Tensor, windows: Windows, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B * M, Q, C) -> (B * M, Q, C), weights"""
        mixed, weights = self.self(x, windows, **kwargs)
        return self.output(mixed), weights


class ExtSwinIntermediate(nn.Module):
    """First half of the feed-forward, C -> F."""

    def __init__(self, config: ExtSwinConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, int(config.mlp_ratio * width))
        self.intermediate_act_fn = make_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))


class ExtSwinLayer(GradientCheckpointingLayer):
    """One pre-LN block (figure 3b of the paper). Every second one of a stage shifts its windows."""

    def __init__(
        self, config: ExtSwinConfig, width: int, num_heads: int, *, shifted: bool, drop_path_rate: float
    ) -> None:
        super().__init__()
        self.shifted = shifted
        self.layernorm_before = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention = ExtSwinAttention(config, width, num_heads)
        self.drop_path = DropPath(drop_path_rate)
        self.layernorm_after = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.intermediate = ExtSwinIntermediate(config, width)
        self.output = ExtSwinDense(config, int(config.mlp_ratio * width), width)

    def forward(self, x: Tensor, plain: Windows, shifted: Windows, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights"""
        windows = shifted if self.shifted else plain
        mixed, weights = self.attention(windows.partition(self.layernorm_before(x)), windows, **kwargs)
        x = x + self.drop_path(windows.merge(mixed))
        return x + self.output(self.intermediate(self.layernorm_after(x))), weights


class ExtSwinStage(nn.Module):
    """Blocks over one grid, and the merging that follows them."""

    def __init__(self, config: ExtSwinConfig, stage: int, drop_path_rates: list[float], merges: bool) -> None:
        super().__init__()
        self.window_size, self.hidden_dropout = config.window_size, config.hidden_dropout_prob
        width = config.embed_dim * 2**stage
        self.blocks = nn.ModuleList(
            ExtSwinLayer(config, width, config.num_heads[stage], shifted=i % 2 == 1, drop_path_rate=rate)
            for i, rate in enumerate(drop_path_rates)
        )
        self.downsample = PatchMerging(width) if merges else None

    def windows(self, x: Tensor, grid: Size, always_partition: bool) -> tuple[Windows, Windows]:
        """The cuts of all blocks, without and with a shift. A grid no larger than a window is one window, and nothing
        is to be shifted, unless `always_partition`."""
        side, shift = self.window_size, self.window_size // 2
        if not always_partition and min(grid) <= side:
            side, shift = min(grid), 0
        common = {"side": side, "table_side": self.window_size, "device": x.device, "dtype": x.dtype}
        # Dropout is drawn in the order of the tokens, and that is row by row in the official class.
        drops = self.training and self.hidden_dropout > 0.0
        kind = Windows if drops or any(size % side for size in grid) else SortedWindows
        plain = kind(grid, shift=0, **common)
        return plain, kind(grid, shift=shift, **common) if shift else plain

    def forward(
        self, x: Tensor, grid: Size, *, always_partition: bool = False, **kwargs: object
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, h * w, C) -> the output, the same before the merging, and the last block's weights."""
        plain, shifted = self.windows(x, grid, always_partition)
        x, weights = plain.sort(x), None
        for block in self.blocks:
            x, weights = block(x, plain, shifted, **kwargs)
        x = plain.unsort(x)
        merged = x if self.downsample is None else self.downsample(x, grid)
        return merged, x, weights


class ExtSwinEncoder(nn.Module):
    """Holds the stages under the checkpoint's name."""

    def __init__(self, config: ExtSwinConfig) -> None:
        super().__init__()
        blocks, stages = sum(config.depths), len(config.depths)
        rates = iter([config.drop_path_rate * i / max(blocks - 1, 1) for i in range(blocks)])
        self.layers = nn.ModuleList(
            ExtSwinStage(config, stage, [next(rates) for _ in range(depth)], merges=stage < stages - 1)
            for stage, depth in enumerate(config.depths)
        )


class ExtSwinPreTrainedModel(ExtPreTrainedModel):
    """Base of all Swin classes."""

    config: ExtSwinConfig
    base_model_prefix = "swin"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _supports_flash_attn = False  # neither takes a bias that is learned
    _supports_flex_attn = False
    _no_split_modules = ["ExtSwinEmbeddings", "ExtSwinStage"]
    _keys_to_ignore_on_load_unexpected = [r"attention\.self\.relative_position_index"]  # a buffer of older files
    _can_record_outputs = {
        "hidden_states": OutputRecorder(ExtSwinStage, index=0),
        "attentions": OutputRecorder(ExtSwinStage, index=2, capture_initial_hidden_state=False),
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExtSwinEmbeddings):
            for parameter in (module.mask_token, module.position_embeddings):
                if parameter is not None:
                    init.zeros_(parameter)
        elif isinstance(module, ExtSwinSelfAttention):
            init.zeros_(module.relative_position_bias_table)


class SwinStages:
    """What runs the stages, in a model that has `embeddings` and `encoder`."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embeddings

    def blocks(self) -> list[nn.Module]:
        """The blocks of all stages."""
        return [block for stage in self.encoder.layers for block in stage.blocks]

    @capture_outputs(tie_last_hidden_states=False)
    def run_stages(
        self,
        x: Tensor,
        grid: Size,
        *,
        before_merging: bool = False,
        output_hidden_states: bool | int | list[int] = False,
        **kwargs: object,
    ) -> ExtSwinModelOutput:
        """(B, T, C) -> the last stage's output, and with `output_hidden_states` maps of the input and of each stage,
        after its merging or before it."""
        maps = [as_map(x, grid)] if output_hidden_states else None
        for stage in self.encoder.layers:
            x, unmerged, _ = stage(x, grid, **kwargs)
            after = grid if stage.downsample is None else tuple((size + 1) // 2 for size in grid)
            if maps is not None:
                maps.append(as_map(unmerged, grid) if before_merging else as_map(x, after))
            grid = after
        return ExtSwinModelOutput(last_hidden_state=x, reshaped_hidden_states=tuple(maps) if maps is not None else None)


class ExtSwinModel(SwinStages, ExtSwinPreTrainedModel):
    """The bare encoder.

    Args:
        config: the configuration.
        add_pooling_layer: whether to take the mean of the tokens.
        use_mask_token: whether patches can be masked.
    """

    def __init__(self, config: ExtSwinConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.embeddings = ExtSwinEmbeddings(config, use_mask_token=use_mask_token)
        self.encoder = ExtSwinEncoder(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pools = add_pooling_layer
        self.post_init()

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        output_hidden_states: bool | int | list[int] | None = None,
        **kwargs: object,
    ) -> ExtSwinModelOutput:
        """Hidden states of the last stage after the final norm, and their mean.

        Args:
            pixel_values: (B, I, height, width) of any size: it is filled up with zeros to whole patches.
            bool_masked_pos: (B, T), True at patches to be replaced by the mask token.
            interpolate_pos_encoding: with learned positions (`use_absolute_embeddings`), take images of another size
                than `config.image_size`. Without them nothing depends on the size.

        Raises:
            ValueError: images of other channels, or of another size where there are positions; a mask that does not
                fit.
        """
        if kwargs.pop("attention_mask", None) is not None:
            raise ValueError("attention_mask was given, but Swin attends inside windows and takes none.")
        kwargs.pop("skip_padding", None)  # there is no padding
        x, grid = self.embeddings(pixel_values, bool_masked_pos, bool(interpolate_pos_encoding))
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        outputs = self.run_stages(x, grid, output_hidden_states=wanted, return_dict=True, **kwargs)
        x = self.layernorm(outputs.last_hidden_state)
        return ExtSwinModelOutput(
            last_hidden_state=x,
            pooler_output=x.mean(1) if self.pools else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            reshaped_hidden_states=outputs.reshaped_hidden_states,
        )

    def patch_grid_of(self, pixel_values: Tensor) -> Size:
        return self.embeddings.patch_embeddings.grid_of(pixel_values)

    def feature_map(self, hidden_states: Tensor, pixel_values: Tensor) -> Tensor:
        grid = self.patch_grid_of(pixel_values)
        for _ in range(self.config.num_layers - 1):
            grid = tuple((size + 1) // 2 for size in grid)
        return as_map(hidden_states, grid)


class SwinHead:
    """For the heads: the hidden states in both layouts."""

    def head_output(self, kind: type[ModelOutput], outputs: ModelOutput, **fields: Tensor | None) -> ModelOutput:
        kind = {
            ImageClassifierOutput: ExtSwinImageClassifierOutput,
            MaskedImageModelingOutput: ExtSwinMaskedImageModelingOutput,
        }[kind]
        fields["reshaped_hidden_states"] = outputs.reshaped_hidden_states
        return super().head_output(kind, outputs, **fields)


class ExtSwinForMaskedImageModeling(SwinHead, MaskedImageModel, ExtSwinPreTrainedModel):
    """Masked patches are filled in, pixel by pixel (SimMIM, Xie et al., 2021, https://arxiv.org/abs/2111.09886)."""

    def __init__(self, config: ExtSwinConfig) -> None:
        super().__init__(config)
        self.swin = ExtSwinModel(config, add_pooling_layer=False, use_mask_token=True)
        self.decoder = PixelDecoder(
            width=config.hidden_size, channels=config.num_channels, stride=config.encoder_stride
        )
        self.post_init()

    def pixels_per_feature(self) -> Size:
        return self.config.total_stride


class ExtSwinForImageClassification(SwinHead, ImageClassificationModel, ExtSwinPreTrainedModel):
    """Single label, several labels, or regression, on the mean of the tokens."""

    def __init__(self, config: ExtSwinConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.swin = ExtSwinModel(config)
        self.classifier = image_classifier(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(outputs.pooler_output)


class ExtSwinBackbone(SwinStages, BackboneMixin, ExtSwinPreTrainedModel):
    """Maps of the stages that `config.out_features` names, each normalised, for detection and segmentation.

    It has the encoder's modules itself, as official files do, and no final norm.
    """

    _keys_to_ignore_on_load_unexpected = [
        *ExtSwinPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^(swin\.)?layernorm\.",  # the stock class writes one and does not use it
        r"^(classifier|decoder)\.",
    ]

    def __init__(self, config: ExtSwinConfig) -> None:
        super().__init__(config)
        self.num_features = [config.embed_dim, *(config.embed_dim * 2**i for i in range(len(config.depths)))]
        self.embeddings = ExtSwinEmbeddings(config)
        self.encoder = ExtSwinEncoder(config)
        self.hidden_states_norms = nn.ModuleDict(
            {stage: nn.LayerNorm(width) for stage, width in zip(self.out_features, self.channels)}
        )
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: Tensor, **kwargs: object) -> BackboneOutput:
        """Returns `feature_maps`, (B, C, h, w) of each wanted stage before its merging, and on request
        `hidden_states`, the maps of all stages, and `attentions`. Windows are never smaller than `window_size`: a small
        grid is filled up."""
        kwargs.pop("skip_padding", None)
        x, grid = self.embeddings(pixel_values, None, True)
        kwargs["output_hidden_states"] = True
        outputs = self.run_stages(x, grid, before_merging=True, always_partition=True, return_dict=True, **kwargs)
        maps = dict(zip(self.stage_names, outputs.reshaped_hidden_states))
        return BackboneOutput(
            feature_maps=tuple(
                norm(maps[stage].permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()
                for stage, norm in self.hidden_states_norms.items()
            ),
            hidden_states=outputs.reshaped_hidden_states,
            attentions=outputs.attentions,
        )
