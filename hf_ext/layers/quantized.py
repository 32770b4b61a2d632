"""Linear layers of 4 bits on processors with AVX512-BF16.

There bitsandbytes (0.50) packs the weight of a `Linear4bit` anew when the layer first computes without gradients, for a
fast kernel in bf16. Four things do not go with that: nothing flows back through packed weights, which stay packed when
training goes on after an evaluation; sizes that are not whole blocks raise an `AssertionError` or a `RuntimeError`;
`dequantize` reads packed weights as if they were not; and a file gets the scales in the wrong order unless they are
quantised too.
"""

from torch import nn

PACKED_ROWS = 32  # of the output, in a block of the kernel


def is_packable(layer: nn.Module) -> bool:
    """Whether the weight of a `Linear4bit` consists of whole blocks."""
    return layer.out_features % PACKED_ROWS == 0 and layer.in_features % layer.weight.blocksize == 0


def unpack(layer: nn.Module) -> None:
    """Give the weight of a `Linear4bit` back the layout of its file; any other layer is left as it is. The scales keep
    the precision that packing left them, bf16."""
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        layer.state_dict()  # unpacks in place, since a file holds the other layout; of the scales only nested ones
        if not state.nested:
            state.absmax = state.absmax.T.flatten().float()  # from (blocks of a row, rows)


def choose_kernels(model: nn.Module, training: bool) -> None:
    """Use the fast kernel where it is right: in layers of sizes that it knows, of a model that is not trained."""
    for layer in model.modules():
        if getattr(layer, "support_avx512bf16_for_cpu", False) and (training or not is_packable(layer)):
            layer.support_avx512bf16_for_cpu = False
            unpack(layer)
