"""The text tower of CLIP: configurations, and texts with an end."""

import torch
from torch import Tensor

from cases.base import Case, Head, padding_mask

CONFIGS = {
    "first-eos": {
        "vocab_size": 53,
        "hidden_size": 24,
        "intermediate_size": 30,
        "projection_dim": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 34,
        "pad_token_id": 1,
        "bos_token_id": 40,
        "eos_token_id": 41,
    },
    # The end of text is the padding as well, so that most rows have several.
    "eos-pads": {
        "vocab_size": 47,
        "hidden_size": 16,
        "intermediate_size": 21,
        "projection_dim": 7,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 33,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "initializer_factor": 1.5,
        "pad_token_id": 9,
        "bos_token_id": 8,
        "eos_token_id": 9,
    },
    # As early files: pooled at the highest id.
    "legacy": {
        "vocab_size": 50,
        "hidden_size": 20,
        "intermediate_size": 33,
        "projection_dim": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 35,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
}


def clip_texts(
    kind: str, config: object, padding: str = "none", *, batch: int = 4, tokens: int = 9, seed: int = 0, **_: object
) -> dict[str, Tensor]:
    """Ids whose last real token is an end of text, or where nothing is padded, the one in the middle too."""
    config = getattr(config, "text_config", config)
    generator = torch.Generator().manual_seed(seed)
    special = (config.pad_token_id, config.eos_token_id, 2, config.vocab_size - 1)
    words = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    ids = words[torch.randint(len(words), (batch, tokens), generator=generator)]
    eos = config.vocab_size - 1 if config.eos_token_id == 2 else config.eos_token_id
    mask = padding_mask(padding, batch, tokens)
    if mask is None:
        ids[:, -1] = eos
        ids[: batch // 2, tokens // 2] = eos
        return {"input_ids": ids}
    last = tokens - 1 - mask.flip(-1).argmax(-1)
    ids[torch.arange(batch), last] = eos
    return {"input_ids": ids.masked_fill(mask == 0, config.pad_token_id), "attention_mask": mask}


def clip_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older files: the positions as buffers."""
    old = dict(tensors)
    for name in tensors:
        if name.endswith("embeddings.position_embedding.weight"):
            old[name.replace("position_embedding.weight", "position_ids")] = torch.arange(len(tensors[name]))[None]
    return old


NONSENSE = (
    ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"intermediate_size": 0}, "intermediate_size"),
    ({"attention_dropout": 1.5}, "attention_dropout"),
    ({"model_type": "bert"}, "bert"),
)

CASE = Case(
    is_decoder=False,
    heads={"ExtCLIPTextModel": Head("text"), "ExtCLIPTextModelWithProjection": Head("text_embedding")},
    configs=CONFIGS,
    dropout={"attention_dropout": 0.2},
    nonsense=(*NONSENSE, ({"vocab_size": 0}, "vocab_size"), ({"max_position_embeddings": 0}, "max_position")),
    inexpressible=(({"eos_token_id": [41, 42]}, "eos_token_id"),),
    legacy_keys=clip_legacy_keys,
    wide={
        "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "projection_dim": 50
    },
    adapter_targets=["q_proj", "v_proj"],
    inputs=clip_texts,
)  # fmt: skip
