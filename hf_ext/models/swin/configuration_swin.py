"""Configuration of Swin (Liu et al., 2021, https://arxiv.org/abs/2103.14030).

Official checkpoints: microsoft/swin-tiny-patch4-window7-224, and every `model_type: swin` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin

from hf_ext.configuration import ExtImageConfig


@strict
class ExtSwinConfig(BackboneConfigMixin, ExtImageConfig):
    """Fields and defaults of the official `swin` configuration; the defaults are Swin-T.

    `depths` and `num_heads` have an entry for each stage; the width doubles from one to the next. `encoder_stride` is
    what the head for masked image modelling enlarges the last grid by: the patch size times 2 for every merging.
    `out_features` (or `out_indices`) are the stages that the backbone returns, among `stage_names`.
    """

    model_type = "ext_swin"
    official_model_type = "swin"
    attribute_map = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
    # Attention stays whole: its heads share one table of biases.
    base_model_tp_plan = {
        "encoder.layers.*.blocks.*.intermediate.dense": "colwise",
        "encoder.layers.*.blocks.*.output.dense": "rowwise",
    }
    base_model_fsdp_plan = {"encoder.layers.*": "free_full_weight", "layernorm": "keep_full_weight"}

    patch_size: int | list[int] | tuple[int, int] = 4
    embed_dim: int = 96
    depths: list[int] | tuple[int, ...] = (2, 2, 6, 2)
    num_heads: list[int] | tuple[int, ...] = (3, 6, 12, 24)
    window_size: int = 7
    mlp_ratio: float | int = 4.0
    qkv_bias: bool = True
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.1
    hidden_act: str = "gelu"
    use_absolute_embeddings: bool = False
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-5
    encoder_stride: int = 32
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.num_layers = len(self.depths)
        self.hidden_size = int(self.embed_dim * 2 ** (self.num_layers - 1))  # of the last stage
        self.stage_names = ["stem", *(f"stage{i + 1}" for i in range(self.num_layers))]
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        super().__post_init__(**kwargs)

    @property
    def total_stride(self) -> tuple[int, int]:
        """Height and width in pixels that a token of the last stage stands for."""
        return tuple(size * 2 ** (self.num_layers - 1) for size in self.patch_shape)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("embed_dim", "window_size", "encoder_stride"):
            self.require_at_least(field, 1)
        for field in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"):
            self.require_probability(field)
        if not isinstance(self.stage_names, list):
            raise ValueError(f"stage_names must be a list of names, or be left out, got {self.stage_names!r}.")
        if not self.depths or len(self.depths) != len(self.num_heads):
            raise ValueError(
                f"depths ({list(self.depths)}) and num_heads ({list(self.num_heads)}) need an entry for each stage."
            )
        if min(self.depths) < 1 or min(self.num_heads) < 1:
            raise ValueError(f"depths ({list(self.depths)}) and num_heads ({list(self.num_heads)}) must be at least 1.")
        for stage, heads in enumerate(self.num_heads):
            width = self.embed_dim * 2**stage
            if width % heads:
                raise ValueError(
                    f"the width of stage {stage + 1}, embed_dim * {2**stage} ({width}), must be a multiple of its "
                    f"num_heads ({heads})."
                )
        if int(self.mlp_ratio * self.embed_dim) < 1:
            raise ValueError(f"mlp_ratio ({self.mlp_ratio}) leaves no width between the feed-forward layers.")
