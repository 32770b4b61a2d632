"""Positions: rotary embeddings.

RoPE (Su et al., 2021, https://arxiv.org/abs/2104.09864) turns pairs of coordinates of queries and keys by an angle
proportional to the position, so that their dot product depends on the distance only.

Shapes: B batch, T tokens, H heads, D head width, R rotated width (D unless a part of the head is rotated).
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + R/2}) by the angles that `RotaryEmbedding` gives.

    Official checkpoints pair the two halves of a head, not neighbours: their weights are permuted accordingly.

    Args:
        x: (B, H, T, D)
        cos: (B or 1, 1, T, R), the angles twice; with R < D only the first R coordinates turn.
        sin: (B or 1, 1, T, R), the angles twice, negative the first time: swapping the halves and one multiplication
            then give (-x_{i + R/2} sin, x_i sin).

    Returns:
        (B, H, T, D)
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(width // 2, dims=-1), sin)


class RotaryEmbedding(nn.Module):
    """Angles of the positions, for every rope type of the library: default, linear, dynamic, yarn, longrope, llama3.

    The frequencies stay in fp32 whatever the model is cast to: in bf16, 256 and 257 are the same number.

    Args:
        config: handed on to the library's functions, which read `rope_parameters`, `head_dim`,
            `max_position_embeddings`.
    """

    def __init__(self, *, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        frequencies, self.attention_scaling = self.compute_frequencies()
        self.inv_freq = nn.Buffer(frequencies["inv_freq"], persistent=False)  # (R / 2,)
        if "long_inv_freq" in frequencies:
            self.long_inv_freq = nn.Buffer(frequencies["long_inv_freq"], persistent=False)  # (R / 2,)

    def compute_frequencies(self, device: torch.device | None = None) -> tuple[dict[str, Tensor], float]:
        """The buffers' values, fp32, and the factor on cos and sin that some rope types ask for."""
        parameters = self.config.rope_parameters
        if self.rope_type == "default":
            head_dim = getattr(self.config, "head_dim", None)
            head_dim = head_dim or self.config.hidden_size // self.config.num_attention_heads
            width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
            return {"inv_freq": 1.0 / parameters["rope_theta"] ** exponents}, 1.0
        compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, scaling = compute(self.config, device)
        frequencies = {"inv_freq": inv_freq}
        if self.rope_type == "longrope":
            # Inputs longer than the original context use another set of factors.
            beyond = parameters["original_max_position_embeddings"] + 1
            frequencies["long_inv_freq"], _ = compute(self.config, device, seq_len=beyond)
        return frequencies, scaling

    def reset_buffers(self) -> None:
        """Recompute the buffers in place: they are not in any file, and loading leaves their memory uninitialised."""
        frequencies, self.attention_scaling = self.compute_frequencies(self.inv_freq.device)
        for name, value in frequencies.items():
            init.copy_(getattr(self, name), value)

    def _apply(self, fn, recurse: bool = True):
        # `model.half()` and the like cast buffers too; the frequencies follow to the device but stay in fp32.
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            for name, value in self.compute_frequencies(self.inv_freq.device)[0].items():
                setattr(self, name, value)
        return self

    def frequencies(self, position_ids: Tensor) -> Tensor:
        """(R / 2,) frequencies for these positions, fp32."""
        buffers: dict[str, Tensor] = self._buffers
        if (
            buffers["inv_freq"].dtype != torch.float32
        ):  # cast behind our back, by a wrapper that writes buffers directly
            buffers, _ = self.compute_frequencies(position_ids.device)
        inv_freq = buffers["inv_freq"].to(position_ids.device)
        if self.rope_type == "dynamic":
            # NTK-aware scaling: the base grows with the length of this very input. Nothing is remembered between
            # calls, so a result never depends on what was computed before.
            parameters = self.config.rope_parameters
            limit, factor = self.config.max_position_embeddings, parameters["factor"]
            width = 2 * inv_freq.shape[0]
            length = (position_ids.max() + 1).clamp(min=limit).float()
            growth = (factor * length / limit - (factor - 1)) ** (width / (width - 2))
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=inv_freq.device) / width
            return 1.0 / (parameters["rope_theta"] * growth) ** exponents
        if self.rope_type == "longrope":
            original = self.config.rope_parameters["original_max_position_embeddings"]
            return torch.where(
                position_ids.max() + 1 > original, buffers["long_inv_freq"].to(inv_freq.device), inv_freq
            )
        return inv_freq

    @torch.no_grad()
    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids (B or 1, T) -> cos and sin as `rotate` takes them, (B or 1, 1, T, R) each.

        Computed in fp32 and cast to `dtype`, once for all layers and heads.
        """
        angles = position_ids[:, None, :, None].float() * self.frequencies(position_ids)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)
