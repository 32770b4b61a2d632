"""Size of a model: parameters, FLOPs of a forward pass, bytes of the key/value cache."""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, PreTrainedModel


def count_parameters(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Number of parameters; a tied parameter counts once, a 4-bit one (two to a byte) as what it stands for.

    Args:
        model: any module.
        trainable_only: leave out parameters with `requires_grad=False`.
    """
    total = 0
    for parameter in model.parameters():  # yields a shared parameter once
        if trainable_only and not parameter.requires_grad:
            continue
        quantised = getattr(parameter, "quant_state", None)  # bitsandbytes' Params4bit packs two values to a byte
        total += quantised.shape.numel() if quantised is not None else parameter.numel()
    return total


def cache_bytes(
    config: PreTrainedConfig, *, batch_size: int, length: int, dtype: torch.dtype | None = None, encoder_length: int = 0
) -> int:
    """Bytes that the key/value cache holds after `length` tokens.

    Two tensors (keys, values) of batch x KV heads x positions x head width in every decoder layer. A layer with a
    sliding window keeps window - 1 positions, as the library's cache does: the newest token is the window's last. A
    cross-attention layer also keeps the encoder's positions.

    Args:
        config: of a decoder or an encoder-decoder.
        batch_size: sequences, beams included.
        length: tokens of each, prompt included.
        dtype: of the cache; None takes the config's, and float32 where that has none.
        encoder_length: source tokens, for encoder-decoders.

    Raises:
        ValueError: the config does not state its layers and heads.
    """
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "decoder_layers", None) or getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "decoder_attention_heads", None) or getattr(text, "num_attention_heads", None)
    if not layers or not heads:
        raise ValueError(f"{type(config).__name__} states no number of layers and heads; it has no key/value cache.")
    kv_heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or heads
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon 7B: one KV head, whatever num_kv_heads says
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    dtype = dtype or getattr(text, "dtype", None) or torch.float32
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    positions = sum(
        min(length, window - 1) if window and kind == "sliding_attention" else length for kind in kinds[:layers]
    )
    if getattr(config, "is_encoder_decoder", False):
        positions += layers * encoder_length
    return 2 * batch_size * kv_heads * width * positions * dtype.itemsize


def forward_flops(model: PreTrainedModel, *, batch_size: int = 1, length: int = 128) -> int:
    """Floating-point operations of one forward pass over token ids without padding; a multiply-add counts as two.

    Counted by torch's own `FlopCounterMode` on a copy without memory (meta device), so that it takes no time and no
    weights. Matrix products and convolutions count; element-wise work does not. Attention counts in full (eager): half
    of it is masked in a causal model, and a kernel may skip that half. A training step costs about three times as much.

    Args:
        model: takes `input_ids`; it is not changed.
        batch_size: sequences B.
        length: tokens of each, T.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        twin = type(model)(config).eval()
        ids = torch.zeros(batch_size, length, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        twin(input_ids=ids)
    return counter.get_total_flops()
