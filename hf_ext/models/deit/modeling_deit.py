"""Training data-efficient image transformers & distillation through attention (Touvron et al., 2020,
https://arxiv.org/abs/2012.12877).

Official checkpoints: facebook/deit-base-distilled-patch16-224 and every `model_type: deit` file. A ViT with a second
token beside the class token, the distillation token, whose head learns from a teacher (section 4). The training is
`hf_ext.training.DistillationTrainer`.

Shapes: B batch, N patches, T = 2 + N tokens, C model width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput
from transformers.utils import can_return_tuple

from hf_ext.heads import ImageClassificationModel, MaskedImageModel, PixelDecoder, TaskHead, image_classifier
from hf_ext.models.deit.configuration_deit import ExtDeiTConfig
from hf_ext.models.vit.modeling_vit import ExtViTEmbeddings, ExtViTModel, ExtViTPreTrainedModel


class ExtDeiTEmbeddings(ExtViTEmbeddings):
    """Class token, distillation token and patches, with learned positions."""

    num_prefix_tokens = 2

    def __init__(self, config: ExtDeiTConfig, use_mask_token: bool = False) -> None:
        super().__init__(config, use_mask_token)
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))

    def prefix_tokens(self) -> tuple[Tensor, ...]:
        return self.cls_token, self.distillation_token


class ExtDeiTPreTrainedModel(ExtViTPreTrainedModel):
    """Base of all DeiT classes."""

    config: ExtDeiTConfig
    base_model_prefix = "deit"
    _no_split_modules = ["ExtDeiTEmbeddings", "ExtViTLayer"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExtDeiTEmbeddings):
            # The official class starts from zeros; the paper draws them as ViT does.
            for parameter in (module.cls_token, module.position_embeddings, module.distillation_token):
                init.zeros_(parameter)


class ExtDeiTModel(ExtDeiTPreTrainedModel, ExtViTModel):
    """The bare encoder.

    Args:
        config: the configuration.
        add_pooling_layer: whether to build the pooler.
        use_mask_token: whether patches can be masked.
    """

    embeddings_class = ExtDeiTEmbeddings


class ExtDeiTForMaskedImageModeling(MaskedImageModel, ExtDeiTPreTrainedModel):
    """Masked patches are filled in, pixel by pixel (SimMIM, Xie et al., 2021, https://arxiv.org/abs/2111.09886)."""

    def __init__(self, config: ExtDeiTConfig) -> None:
        super().__init__(config)
        self.deit = ExtDeiTModel(config, add_pooling_layer=False, use_mask_token=True)
        self.decoder = PixelDecoder(
            width=config.hidden_size, channels=config.num_channels, stride=config.encoder_stride
        )
        self.post_init()


class ExtDeiTForImageClassification(ImageClassificationModel, ExtDeiTPreTrainedModel):
    """Single label, several labels, or regression, on the class token."""

    def __init__(self, config: ExtDeiTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.deit = ExtDeiTModel(config, add_pooling_layer=False)
        self.classifier = image_classifier(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(outputs.last_hidden_state[:, 0])


@dataclass
class TwoClassifiersOutput(ModelOutput):
    """`logits` (B, num_labels), the mean of `cls_logits` and `distillation_logits`, `hidden_states`, `attentions`."""

    logits: Tensor | None = None
    cls_logits: Tensor | None = None
    distillation_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ExtDeiTForImageClassificationWithTeacher(TaskHead, ExtDeiTPreTrainedModel):
    """A classifier on the class token and one on the distillation token, of which the mean is the prediction (section
    5.2). The loss needs a teacher: `hf_ext.training.DistillationTrainer`."""

    accepts_loss_kwargs = False

    def __init__(self, config: ExtDeiTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.deit = ExtDeiTModel(config, add_pooling_layer=False)
        self.cls_classifier = image_classifier(config.hidden_size, config.num_labels)
        self.distillation_classifier = image_classifier(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> TwoClassifiersOutput:
        """Returns `logits`, `cls_logits` and `distillation_logits` (B, num_labels), `hidden_states`, `attentions`."""
        outputs = self.run_base(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            **kwargs,
        )
        cls_logits = self.cls_classifier(outputs.last_hidden_state[:, 0])
        distillation_logits = self.distillation_classifier(outputs.last_hidden_state[:, 1])
        return self.head_output(
            TwoClassifiersOutput,
            outputs,
            logits=(cls_logits + distillation_logits) / 2,
            cls_logits=cls_logits,
            distillation_logits=distillation_logits,
        )
