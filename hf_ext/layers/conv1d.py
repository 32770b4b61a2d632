"""`Conv1D`, the linear layer of GPT-1 and GPT-2, whose weight (C_in, C_out) is transposed, and its tensor parallelism.

Shoeybi et al., *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*, 2019,
https://arxiv.org/abs/1909.08053, section 3: a layer divided by columns needs no communication before the one divided
by rows that follows it. The library's own styles are for `Linear`.

Styles of a plan:
    conv1d_colwise: every process has a share of the output's columns.
    conv1d_colwise_2, conv1d_colwise_3: a share of each of two or three blocks side by side, such as query, key, value.
    conv1d_rowwise: every process has the rows that its share of the input meets; the results are added up.
"""

import torch.distributed
from torch import Tensor, nn
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer
from transformers.pytorch_utils import Conv1D

__all__ = ["Conv1D"]  # importing it from here makes the styles known

if torch.distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard


def distribute(module: nn.Module, name: str, mesh: "DeviceMesh", placement: "Placement") -> None:
    """Put a process's share in the place of a parameter; `from_pretrained` fills it."""
    parameter = module.get_parameter(name)
    share = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(share, requires_grad=parameter.requires_grad))


class Conv1DColumns(TensorParallelLayer):
    """(..., C_in), the same on all processes -> (..., C_out / processes).

    Args:
        blocks: parts of equal width that the output consists of; each is divided by itself.
    """

    def __init__(self, blocks: int = 1) -> None:
        self.blocks = blocks

    def shard_param(self, module: nn.Module, param: str, mesh: "DeviceMesh") -> None:
        last = module.get_parameter(param).dim() - 1
        placement = Shard(last) if self.blocks == 1 else _StridedShard(last, split_factor=self.blocks)
        distribute(module, param, mesh, placement)

    def install_forward(self, module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            # Each process finds a part of the input's gradient; on the way back they are added up.
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
            return x @ module.weight.to_local() + module.bias.to_local()

        module.forward = forward
        return module


class Conv1DRows(TensorParallelLayer):
    """(..., C_in / processes) -> (..., C_out), the same on all processes."""

    def shard_param(self, module: nn.Module, param: str, mesh: "DeviceMesh") -> None:
        distribute(module, param, mesh, Shard(0) if param == "weight" else Replicate())

    def install_forward(self, module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            part = DTensor.from_local(x @ module.weight.to_local(), mesh, [Partial()], run_check=False)
            return part.redistribute(placements=[Replicate()]).to_local() + module.bias.to_local()

        module.forward = forward
        return module


if torch.distributed.is_available():
    ALL_PARALLEL_STYLES.register("conv1d_colwise", Conv1DColumns())
    ALL_PARALLEL_STYLES.register("conv1d_colwise_2", Conv1DColumns(2))
    ALL_PARALLEL_STYLES.register("conv1d_colwise_3", Conv1DColumns(3))
    ALL_PARALLEL_STYLES.register("conv1d_rowwise", Conv1DRows())
