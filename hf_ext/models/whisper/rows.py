"""What `generate` returned, taken apart and put together by rows: those of one call may end up in different segments,
and a row may come from a second attempt.
"""

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import ModelOutput


def layer_tensors(cache: EncoderDecoderCache) -> list[tuple[Tensor, ...]]:
    """Keys and values of self- and cross-attention for each layer."""
    halves = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    return [(own.keys, own.values, cross.keys, cross.values) for own, cross in halves]


def take_row(value: object, row: int) -> object:
    """A row of what `generate` returned, on the CPU: a tensor, one for each step, or one for each step and layer."""
    if value is None:
        return None
    if isinstance(value, EncoderDecoderCache):
        layers = [tuple(x[row : row + 1].cpu() for x in layer) for layer in layer_tensors(value)]
        return EncoderDecoderCache(layers)
    if isinstance(value, Tensor):
        return value[row].cpu()
    if isinstance(value[0], Tensor):
        return [x[row].cpu() for x in value]
    return tuple(tuple(x[row : row + 1].cpu() for x in step) for step in value)


def split_rows(outputs: ModelOutput, *, keep_cache: bool) -> list[dict]:
    """What `generate` returned, row by row. With beams, scores are those of the beam that the result came from."""
    beams = outputs.get("beam_indices")
    results = []
    for row in range(outputs.sequences.shape[0]):
        result = {}
        for name, value in outputs.items():
            if name == "past_key_values" and not keep_cache:
                result[name] = None  # one for each window would fill the memory
            elif name == "scores" and beams is not None:
                result[name] = [step[beam].cpu() for step, beam in zip(value, beams[row].tolist(), strict=False)]
            else:
                result[name] = take_row(value, row)
        results.append(result)
    return results


def join_rows(values: list, device: torch.device) -> object:
    """The inverse of `take_row`."""
    first = values[0]
    if first is None:
        return None
    if isinstance(first, EncoderDecoderCache):
        layers = zip(*map(layer_tensors, values), strict=True)
        return EncoderDecoderCache(
            [tuple(torch.cat(x).to(device) for x in zip(*layer, strict=True)) for layer in layers]
        )
    if isinstance(first, Tensor):
        return torch.stack(values).to(device)
    if isinstance(first[0], Tensor):
        return tuple(torch.stack(step).to(device) for step in zip(*values, strict=False))
    return tuple(
        tuple(torch.cat(layer).to(device) for layer in zip(*step, strict=True)) for step in zip(*values, strict=False)
    )
