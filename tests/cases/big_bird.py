"""BigBird: configurations, heads, and what official files look like."""

import random

import torch
import transformers
from torch import Tensor, nn

from cases.base import Case, Head, text_inputs


def big_bird_configs(seed: int = 0) -> dict[str, dict]:
    """Blocks of 2 and 3 tokens with one or two random ones, and full attention; with and without biases and scaling.

    The inputs of the tests have 18 tokens (`big_bird_inputs`): a multiple of both blocks, as the official class fills
    its input up and draws dropout for that too, and beyond the length that is attended fully, but for "full".
    """
    draw = random.Random(seed)
    configs = {}
    for name, attention, block, count, act, tie, pad, bias, rescale in (
        ("sparse", "block_sparse", 2, 1, "gelu_new", True, 0, True, False),
        ("sparse2-untied", "block_sparse", 1, 2, "relu", False, 3, False, True),
        ("full", "original_full", 3, 3, "gelu", True, 0, False, True),
    ):
        heads = draw.choice([2, 3, 4])
        head_width = draw.choice([5, 7, 8]) if name != "sparse" else 8
        configs[name] = {
            "attention_type": attention,
            "block_size": block,
            "num_random_blocks": count,
            "use_bias": bias,
            "rescale_embeddings": rescale,
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * head_width,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "intermediate_size": draw.randint(17, 50),
            "hidden_act": act,
            "max_position_embeddings": draw.randint(50, 60),
            "type_vocab_size": 2,
            "layer_norm_eps": draw.choice([1e-12, 1e-6, 1e-5]),
            "pad_token_id": pad,
            "sep_token_id": 4,
            "tie_word_embeddings": tie,
            "num_labels": 3,
        }
    return configs


def big_bird_inputs(
    kind: str, config: object, padding: str = "none", *, tokens: int = 18, seed: int = 0, **kwargs: int
) -> dict[str, Tensor]:
    """Text inputs; questions end before the first token that has text, where `text_labels` lets answers begin."""
    inputs = text_inputs(kind, config, padding, tokens=tokens, seed=seed, **kwargs)
    if kind == "span":
        first = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).long().argmax(-1, keepdim=True)
        inputs["question_lengths"] = first.clamp(min=1)
    return inputs


def _own_tokens(module: nn.Module, args: tuple, given: dict) -> tuple[tuple, dict]:
    return args, {**given, "encoder_hidden_states": None}


def _encoders_mask(module: nn.Module, args: tuple, given: dict) -> tuple[tuple, dict]:
    return args, {**given, "encoder_attention_mask": given["attention_mask"], "past_key_values": None}


class _Repaired:
    """In a decoder with cross-attention the official self-attention looks at the encoder instead of the decoder's own
    tokens; the cross-attention passes over the encoder's mask, and with a cache takes the keys of self-attention for
    those of the encoder."""

    def __init__(self, config: transformers.BigBirdConfig) -> None:
        super().__init__(config)
        for name, module in self.named_modules():
            if config.add_cross_attention and name.endswith(".attention"):
                module.register_forward_pre_hook(_own_tokens, with_kwargs=True)
            elif name.endswith(".crossattention"):
                module.register_forward_pre_hook(_encoders_mask, with_kwargs=True)


class BigBirdModel(_Repaired, transformers.BigBirdModel):
    pass


class BigBirdForCausalLM(_Repaired, transformers.BigBirdForCausalLM):
    pass


_UNTIED_BIAS = (r"cls\.predictions\.bias",)
_POOLER = (r"bert\.pooler\..*",)
_DECODER = {"is_decoder": True, "attention_type": "original_full"}  # as the official class makes itself
_CROSS = {**_DECODER, "add_cross_attention": True}

CASE = Case(
    is_decoder=False,
    heads={
        "ExtBigBirdModel": Head("base", variants={"decoder": _DECODER, "cross": _CROSS}),
        "ExtBigBirdForPreTraining": Head("pretraining", unused_when_untied=_UNTIED_BIAS),
        "ExtBigBirdForMaskedLM": Head("masked", without_gradient=_POOLER, unused_when_untied=_UNTIED_BIAS),
        "ExtBigBirdForCausalLM": Head(
            "causal",
            overrides=_DECODER,
            variants={"cross": _CROSS},
            without_gradient=_POOLER,
            unused_when_untied=_UNTIED_BIAS,
        ),
        "ExtBigBirdForSequenceClassification": Head("row", without_gradient=_POOLER),
        "ExtBigBirdForTokenClassification": Head("token", without_gradient=_POOLER),
        "ExtBigBirdForQuestionAnswering": Head("span", overrides={"num_labels": 2}),
        "ExtBigBirdForMultipleChoice": Head("choice"),
    },
    configs=big_bird_configs(),
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "classifier_dropout": 0.3},
    inputs=big_bird_inputs,
    # All of it the question: then segments are zero by default.
    beside_text=lambda kind, encoded: (
        {"question_lengths": torch.full((len(encoded["input_ids"]), 1), 99)} if kind == "span" else {}
    ),
    differs_in_training=("sparse", "sparse2-untied"),  # by its random blocks
    stock_classes={"ExtBigBirdModel": BigBirdModel, "ExtBigBirdForCausalLM": BigBirdForCausalLM},
    adapter_targets=["query", "value"],  # PEFT knows none for this type
    nonsense=(
        ({"attention_type": "sparse"}, "attention_type"),
        ({"block_size": 0}, "block_size"),
        ({"num_random_blocks": -1}, "num_random_blocks"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"classifier_dropout": 1.5}, "classifier_dropout"),
        ({"add_cross_attention": True}, "is_decoder"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "bigbird-roberta-base": {
            "architectures": ["BigBirdForPreTraining"],
            "attention_probs_dropout_prob": 0.1,
            "attention_type": "block_sparse",
            "block_size": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "gradient_checkpointing": False,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 4096,
            "model_type": "big_bird",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "num_random_blocks": 3,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "rescale_embeddings": False,
            "sep_token_id": 66,
            "transformers_version": "4.4.0.dev0",
            "type_vocab_size": 2,
            "use_bias": True,
            "use_cache": True,
            "vocab_size": 50358,
        },
        "integer zeros": {"model_type": "big_bird", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    },
    legacy_keys=lambda tensors: {
        **tensors,
        ("bert." if any(name.startswith("bert.") for name in tensors) else "")
        + "embeddings.position_ids": torch.arange(512)[None],
    },
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
