"""Configuration of GPT-Neo (Black et al., 2021, https://doi.org/10.5281/zenodo.5297715).

Official checkpoints: EleutherAI/gpt-neo-125m, -1.3B, -2.7B, roneneldan/TinyStories-33M, and every `model_type: gpt_neo`
file.
"""

from collections.abc import Sequence
from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig

LAYER_TYPES = {"global": "full_attention", "local": "sliding_attention"}  # GPT-Neo's name -> the library's


@strict
class ExtGPTNeoConfig(ExtConfig):
    """Fields and defaults of the official `gpt_neo` configuration.

    `attention_types` is a list of pairs (kinds, repeats): `[[["global", "local"], 12]]` are 24 layers that alternate;
    by default the layers alternate too, as many as there are. Official files also hold its expansion,
    `attention_layers`. A local layer's token sees the last `window_size` tokens, its own included.
    `intermediate_size` of `None` is four times `hidden_size`.
    """

    model_type = "ext_gpt_neo"
    official_model_type = "gpt_neo"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "sliding_window": "window_size",  # the library's masks and caches look for this name
    }
    base_model_tp_plan = {
        "h.*.attn.attention.q_proj": "colwise",
        "h.*.attn.attention.k_proj": "colwise",
        "h.*.attn.attention.v_proj": "colwise",
        "h.*.attn.attention.out_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }

    vocab_size: int = 50257
    max_position_embeddings: int = 2048
    hidden_size: int = 2048
    num_layers: int = 24
    attention_types: list | tuple | None = None
    attention_layers: list | tuple | None = None
    num_heads: int = 16
    intermediate_size: int | None = None
    window_size: int = 256
    activation_function: str = "gelu_new"
    resid_dropout: float | int = 0.0
    embed_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.1
    layer_norm_epsilon: float | int = 1e-5
    initializer_range: float | int = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        # The general name may be the one that was given; the number decides how the layers alternate.
        self.num_layers = kwargs.pop("num_hidden_layers", self.num_layers)
        if self.attention_types is None and self.attention_layers is not None:
            self.attention_types = [[list(self.attention_layers), 1]]
        elif self.attention_types is None:
            self.attention_types = [[["global", "local"], self.num_layers // 2]]
            if self.num_layers % 2:
                self.attention_types.append([["global"], 1])
        if self.attention_layers is None:
            self.attention_layers = self.expand(self.attention_types)
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer, as the library's masks and caches name them."""
        return [LAYER_TYPES[kind] for kind in self.attention_layers]

    @staticmethod
    def expand(attention_types: Sequence) -> list[str]:
        """Pairs (kinds, repeats) -> the kind of each layer.

        Raises:
            ValueError: something else than such pairs, or an unknown kind.
        """
        layers: list[str] = []
        for pair in attention_types:
            if (
                not isinstance(pair, list | tuple)
                or len(pair) != 2
                or not isinstance(pair[0], list | tuple)
                or not isinstance(pair[1], int)
            ):
                raise ValueError(
                    f'attention_types must hold pairs of kinds and repeats, such as [["global", "local"], 12], '
                    f"got {pair!r}."
                )
            layers += list(pair[0]) * pair[1]
        unknown = sorted({str(kind) for kind in layers if kind not in LAYER_TYPES})
        if unknown:
            raise ValueError(f"attention_types names {', '.join(unknown)}; known are {', '.join(LAYER_TYPES)}.")
        return layers

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "hidden_size", "max_position_embeddings", "num_heads", "window_size"):
            self.require_at_least(field, 1)
        self.require_at_least("num_layers", 0)
        if self.intermediate_size is not None:
            self.require_at_least("intermediate_size", 1)
        self.require_divisible("hidden_size", "num_heads")
        for field in ("resid_dropout", "embed_dropout", "attention_dropout", "classifier_dropout"):
            self.require_probability(field)
        expanded = self.expand(self.attention_types)
        if len(expanded) != self.num_layers:
            raise ValueError(
                f"attention_types describes {len(expanded)} layers, but num_layers is {self.num_layers}: "
                f"{self.attention_types!r}. Make them agree, or leave attention_types out for layers that alternate."
            )
        if list(self.attention_layers) != expanded:
            raise ValueError(
                f"attention_layers {list(self.attention_layers)!r} contradicts attention_types "
                f"{self.attention_types!r}, which is {expanded!r}; leave one of them out."
            )
