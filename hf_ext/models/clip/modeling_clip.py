"""Learning Transferable Visual Models From Natural Language Supervision (Radford et al., 2021,
https://arxiv.org/abs/2103.00020).

Official checkpoints: openai/clip-vit-base-patch32 and every `model_type: clip` file. A text encoder and an image
encoder (`modeling_clip_towers.py`), whose pooled outputs are projected into one space, in which a text and its image
are to be near each other.

Shapes: B batch, T tokens, C model width, E width of the shared space.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput
from transformers.utils import can_return_tuple

from hf_ext.heads import ImageClassificationModel, TaskHead, image_classifier
from hf_ext.losses import contrastive_loss
from hf_ext.modeling import positional
from hf_ext.models.clip.configuration_clip import ExtCLIPConfig, ExtCLIPTextConfig, ExtCLIPVisionConfig
from hf_ext.models.clip.modeling_clip_towers import (
    ExtCLIPPreTrainedModel,
    ExtCLIPTextModel,
    ExtCLIPTextPreTrainedModel,
    ExtCLIPVisionModel,
    ExtCLIPVisionPreTrainedModel,
    linear,
)


@dataclass
class ExtCLIPTextModelOutput(ModelOutput):
    """`text_embeds` (B, E), `last_hidden_state` (B, T, C), `hidden_states`, `attentions`."""

    text_embeds: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class ExtCLIPVisionModelOutput(ModelOutput):
    """`image_embeds` (B, E), `last_hidden_state` (B, T, C), `hidden_states`, `attentions`."""

    image_embeds: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ExtCLIPTextModelWithProjection(TaskHead, ExtCLIPTextPreTrainedModel):
    """Texts in the shared space."""

    def __init__(self, config: ExtCLIPTextConfig) -> None:
        super().__init__(config)
        self.text_model = ExtCLIPTextModel(config)
        std = config.hidden_size**-0.5 * config.initializer_factor
        self.text_projection = linear(config.hidden_size, config.projection_dim, init_std=std, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: object,
    ) -> ExtCLIPTextModelOutput:
        """Arguments as `ExtCLIPTextModel`."""
        outputs = self.run_base(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        text_embeds = self.text_projection(outputs.pooler_output)
        return self.head_output(
            ExtCLIPTextModelOutput, outputs, text_embeds=text_embeds, last_hidden_state=outputs.last_hidden_state
        )


class ExtCLIPVisionModelWithProjection(TaskHead, ExtCLIPVisionPreTrainedModel):
    """Images in the shared space."""

    def __init__(self, config: ExtCLIPVisionConfig) -> None:
        super().__init__(config)
        self.vision_model = ExtCLIPVisionModel(config)
        std = config.hidden_size**-0.5 * config.initializer_factor
        self.visual_projection = linear(config.hidden_size, config.projection_dim, init_std=std, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, interpolate_pos_encoding: bool = False, **kwargs: object
    ) -> ExtCLIPVisionModelOutput:
        """Arguments as `ExtCLIPVisionModel`."""
        outputs = self.run_base(pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        image_embeds = self.visual_projection(outputs.pooler_output)
        return self.head_output(
            ExtCLIPVisionModelOutput, outputs, image_embeds=image_embeds, last_hidden_state=outputs.last_hidden_state
        )


@dataclass
class ExtCLIPOutput(ModelOutput):
    """`loss`, `logits_per_image` (images, texts) and its transpose `logits_per_text`, the normalised `text_embeds` and
    `image_embeds` (B, E), and the outputs of both towers with projected `pooler_output`."""

    loss: Tensor | None = None
    logits_per_image: Tensor | None = None
    logits_per_text: Tensor | None = None
    text_embeds: Tensor | None = None
    image_embeds: Tensor | None = None
    text_model_output: BaseModelOutputWithPooling | None = None
    vision_model_output: BaseModelOutputWithPooling | None = None

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(x.to_tuple() if isinstance(x, ModelOutput) else x for x in self.values())


class ExtCLIPModel(ExtCLIPPreTrainedModel):
    """Both towers, and the similarity of every text to every image."""

    accepts_loss_kwargs = False

    def __init__(self, config: ExtCLIPConfig) -> None:
        super().__init__(config)
        text, vision = config.text_config, config.vision_config
        self.text_model = ExtCLIPTextModel._from_config(text)
        self.vision_model = ExtCLIPVisionModel._from_config(vision)
        factor, shared = config.initializer_factor, config.projection_dim
        self.visual_projection = linear(
            vision.hidden_size, shared, init_std=vision.hidden_size**-0.5 * factor, bias=False
        )
        self.text_projection = linear(text.hidden_size, shared, init_std=text.hidden_size**-0.5 * factor, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(float(config.logit_scale_init_value)))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.constant_(self.logit_scale, float(self.config.logit_scale_init_value))

    def get_input_embeddings(self) -> nn.Module:
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.text_model.set_input_embeddings(value)

    def blocks(self) -> list[nn.Module]:
        """The blocks of both towers."""
        return [*self.text_model.blocks(), *self.vision_model.blocks()]

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPooling:
        """The text tower's output with the projected `pooler_output` (B, E); arguments as `ExtCLIPTextModel`."""
        if not self.config.skip_padding:
            kwargs.setdefault("skip_padding", False)
        outputs = self.text_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        outputs.pooler_output = self.text_projection(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def get_image_features(
        self, pixel_values: Tensor | None = None, interpolate_pos_encoding: bool = False, **kwargs: object
    ) -> BaseModelOutputWithPooling:
        """The vision tower's output with the projected `pooler_output` (B, E); arguments as `ExtCLIPVisionModel`."""
        outputs = self.vision_model(
            pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, return_dict=True, **kwargs
        )
        outputs.pooler_output = self.visual_projection(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_loss: bool | None = None,
        interpolate_pos_encoding: bool = False,
        pooled_only: bool = False,
        skip_padding: bool | None = None,
        **kwargs: object,
    ) -> ExtCLIPOutput:
        """Similarities, and with `return_loss` the contrastive loss, for which text i belongs to image i.

        Args:
            input_ids, attention_mask, position_ids, pooled_only, skip_padding: as `ExtCLIPTextModel`.
            pixel_values, interpolate_pos_encoding: as `ExtCLIPVisionModel`.
            return_loss: in training over several processes the loss is that of the pairs of all of them
                (`config.contrast_across_processes`); the logits are always those of this batch.

        Raises:
            ValueError: as the towers, and with `return_loss` as many texts as images are needed.
        """
        vision = self.get_image_features(pixel_values, interpolate_pos_encoding, **kwargs)
        skip = {} if skip_padding is None else {"skip_padding": skip_padding}
        text = self.get_text_features(
            input_ids, attention_mask, position_ids, pooled_only=pooled_only, **skip, **kwargs
        )
        image_embeds, text_embeds = (
            x / x.square().sum(-1, keepdim=True).sqrt() for x in (vision.pooler_output, text.pooler_output)
        )
        scale = self.logit_scale.exp().to(text_embeds.device)
        image_embeds = image_embeds.to(text_embeds.device)
        logits_per_text = text_embeds @ image_embeds.t() * scale
        loss = None
        if return_loss:
            across = self.training and self.config.contrast_across_processes
            loss = contrastive_loss(text_embeds, image_embeds, scale, across_processes=across)
        return ExtCLIPOutput(
            loss=loss,
            logits_per_image=logits_per_text.t(),
            logits_per_text=logits_per_text,
            text_embeds=text_embeds,
            image_embeds=image_embeds,
            text_model_output=text,
            vision_model_output=vision,
        )


@positional("pixel_values", "labels")
class ExtCLIPForImageClassification(ImageClassificationModel, ExtCLIPPreTrainedModel):
    """Single label, several labels, or regression, on the mean of the patches."""

    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _keys_to_ignore_on_load_unexpected = ExtCLIPVisionPreTrainedModel._keys_to_ignore_on_load_unexpected

    def __init__(self, config: ExtCLIPConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vision_model = ExtCLIPVisionModel._from_config(config.vision_config)
        width = config.vision_config.hidden_size
        self.classifier = image_classifier(width, config.num_labels)
        self.classifier.init_std = width**-0.5 * config.initializer_factor
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(self.vision_model.patches_of(outputs.last_hidden_state).mean(1))
