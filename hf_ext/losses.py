"""Losses: over a vocabulary without ever holding all logits at once, of distillation, contrastive over processes.

The logits of a language-modelling head are the largest tensor of a training step (tokens x vocabulary, several copies
in forward and backward). Here rows without a label are dropped before the multiplication with the vocabulary, and the
rest is done a chunk of rows at a time. Same loss and gradients as the plain way.

Shapes: N rows, C model width, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, linear_cross_entropy, pad
from torch.utils.checkpoint import checkpoint
from transformers.utils.import_utils import is_tracing

from hf_ext.layers.linear import is_plain_linear

IGNORE_INDEX = -100


def shift_labels_left(labels: Tensor) -> Tensor:
    """(B, T) labels -> (B, T): position t gets the label of t + 1, the last one none."""
    return pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def vocabulary_loss(
    hidden: Tensor,
    labels: Tensor,
    head: nn.Module,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    logits_bias: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    label_smoothing: float = 0.0,
    chunk_size: int = 512,
) -> Tensor:
    """Cross-entropy of `head(transform(hidden)) + logits_bias` against `labels`.

    Args:
        hidden: (..., C) hidden states.
        labels: (...) token ids aligned with `hidden`, -100 where there is nothing to predict.
        head: the output embedding, C -> V.
        transform: what comes between the hidden states and the output embedding; applied to labelled rows only.
        logits_bias: (V,) numbers that are added to the logits and not trained; for heads without a bias of their own.
        num_items_in_batch: divide the sum by this instead of the number of labels: `Trainer` passes the count over
            all micro-batches that make up one step.
        label_smoothing: weight of the uniform distribution in the target (Szegedy et al., 2015,
            https://arxiv.org/abs/1512.00567).
        chunk_size: rows of logits that exist at the same time.

    Returns:
        Scalar, fp32 or wider. Without any label it is 0, and so are all gradients.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device, torch.long)
    tracing = torch.compiler.is_compiling()
    if not tracing:  # a shape that depends on data would break the graph
        labelled = (labels != IGNORE_INDEX).nonzero().squeeze(-1)
        if labelled.numel() < labels.numel():
            hidden, labels = hidden.index_select(0, labelled), labels.index_select(0, labelled)
        check_classes(labels, getattr(head, "out_features", None), "labels", "vocab_size")
    if transform is not None:
        hidden = transform(hidden)
    if tracing:
        logits = add_bias(head(hidden), logits_bias).float()
        total = cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    elif is_one_matrix(head):
        total = fused_total(hidden, labels, head, label_smoothing, chunk_size, logits_bias)
    else:
        total = checkpointed_total(hidden, labels, head, label_smoothing, chunk_size, logits_bias)
    return share(total, labels, num_items_in_batch)


def check_classes(labels: Tensor, classes: int | None, name: str, limit_name: str) -> None:
    """Raise ValueError for labels outside the classes, on CPU; on a GPU the kernel's assertion is the only sign."""
    if classes is None or labels.device.type != "cpu" or not labels.numel() or is_tracing(labels):
        return
    counted = labels[labels != IGNORE_INDEX]
    bad = counted[(counted < 0) | (counted >= classes)]
    if bad.numel():
        raise ValueError(
            f"{name} holds {bad[0].item()}, outside 0..{classes - 1} ({limit_name}={classes}); "
            f"{IGNORE_INDEX} marks places without a label."
        )


def share(total: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """The sum over rows, divided by the labels of this batch or, where it is known, of the whole step; never by 0."""
    if num_items_in_batch is None:
        return total / (labels != IGNORE_INDEX).sum().clamp(min=1)
    if torch.is_tensor(num_items_in_batch):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def is_one_matrix(head: nn.Module) -> bool:
    """Whether the head is nothing but one matrix in fp32. In half precision torch's chunked operation adds up in half
    precision too, so there the head is called."""
    return (
        is_plain_linear(head)
        and head.weight.dtype == torch.float32
        and not torch.is_autocast_enabled(head.weight.device.type)
    )


def add_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    """(..., V) and (V,) -> (..., V)"""
    return logits if bias is None else logits + bias.to(logits.device)


def fused_total(
    hidden: Tensor,
    labels: Tensor,
    head: nn.Linear,
    label_smoothing: float,
    chunk_size: int,
    logits_bias: Tensor | None = None,
) -> Tensor:
    """Sum over rows by torch's own chunked operation."""
    weight, bias = head.weight, head.bias
    if logits_bias is not None:
        logits_bias = logits_bias.to(weight)
        bias = logits_bias if bias is None else bias + logits_bias
    if not hidden.shape[0]:  # nothing to predict, yet every parameter gets a gradient, of zero
        return sum(x.sum() * 0.0 for x in (hidden, weight, bias) if x is not None)
    total = linear_cross_entropy(
        hidden,
        weight,
        labels,
        linear_bias=bias,
        reduction="sum",
        ignore_index=IGNORE_INDEX,
        # An explicit chunk size: the automatic one is several times slower on CPU.
        options=nn.LinearCrossEntropyOptions(
            batch_chunk_size=min(chunk_size, hidden.shape[0]),
            chunking_method=None,
            acc_policy="compact",
            allow_retain_graph=True,
        ),
    )
    if label_smoothing:
        # The operation does not chunk with smoothing. The smoothed loss is the plain one plus
        # smoothing * (logit of the label - mean logit), which needs no logits: the mean of W h is the mean of W by h.
        margin = (hidden * (weight[labels] - weight.mean(0))).sum()
        if bias is not None:
            margin = margin + (bias[labels] - bias.mean()).sum()
        total = total + label_smoothing * margin
    return total


def checkpointed_total(
    hidden: Tensor,
    labels: Tensor,
    head: nn.Module,
    label_smoothing: float,
    chunk_size: int,
    logits_bias: Tensor | None = None,
) -> Tensor:
    """Sum over rows for heads that must be called: each chunk's logits are computed again in the backward pass."""

    def chunk_total(rows: Tensor, targets: Tensor) -> Tensor:
        logits = add_bias(head(rows), logits_bias).float()
        return cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)

    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, targets in zip(hidden.split(chunk_size), labels.split(chunk_size), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(chunk_total, rows, targets, use_reentrant=False)
        else:
            total = total + chunk_total(rows, targets)
    return total


def mean_or_share(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy over a small set of classes, computed plainly.

    Args:
        logits: (..., classes); labels: (...), -100 where there is nothing to predict.
        num_items_in_batch: as in `vocabulary_loss`.

    Returns:
        Scalar; without any label it is 0.
    """
    labels = labels.reshape(-1).to(logits.device, torch.long)
    check_classes(labels, logits.shape[-1], "labels", "num_labels")
    total = cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels, reduction="sum", label_smoothing=label_smoothing
    )
    return share(total, labels, num_items_in_batch)


def distillation_loss(
    logits: Tensor,
    distillation_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    hard: bool = True,
    weight: float = 0.5,
    temperature: float = 3.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """What a student learns from labels and a teacher (DeiT, Touvron et al., 2020, https://arxiv.org/abs/2012.12877,
    section 4, equations 2 and 3).

    Args:
        logits: (B, classes) of the head that learns the labels.
        distillation_logits: (B, classes) of the head that learns from the teacher; the same tensor in students with
            one head.
        teacher_logits: (B, classes), of a teacher that needs no gradients.
        labels: (B,)
        hard: whether the teacher's most likely class is a second label; else its distribution is the target (Hinton et
            al., 2015, https://arxiv.org/abs/1503.02531).
        weight: of the teacher's term, the paper's lambda; the labels' term has the rest. The paper has 1/2 for hard and
            0.1 for soft distillation.
        temperature: the paper's tau, divides the logits of soft distillation.
        label_smoothing: of the labels' term.

    Returns:
        Scalar, a mean over the rows. The divergence is a sum over the classes, as in the paper; the authors' program
        divides it by their number.
    """
    supervised = cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)
    student, teacher = distillation_logits.float(), teacher_logits.detach().float()
    if hard:
        taught = cross_entropy(student, teacher.argmax(-1))
    else:
        student, teacher = ((x / temperature).log_softmax(-1) for x in (student, teacher))
        taught = kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
    return (1 - weight) * supervised + weight * taught


class GatherRows(torch.autograd.Function):
    """The rows of all processes, (B, E) -> (processes * B, E), in the order of the processes; gradients go back to the
    process that each row came from, summed over the processes that used it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor) -> Tensor:
        ctx.rows = rows.shape[0]
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        start = dist.get_rank() * ctx.rows
        return gradient[start : start + ctx.rows]


def contrastive_loss(
    text_embeds: Tensor, image_embeds: Tensor, scale: Tensor, *, across_processes: bool = False
) -> Tensor:
    """CLIP's loss: each text is to find its image among all images, and each image its text (Radford et al., 2021,
    https://arxiv.org/abs/2103.00020, figure 3).

    Args:
        text_embeds: (B, E), normalised; image_embeds: the same, row i of both belonging together.
        scale: scalar, the inverse temperature.
        across_processes: compare with the rows of all processes. With gradients averaged over the processes, as
            distributed data parallel does, a step is that of one process with the whole batch. Without a process group
            nothing changes. All processes need equally many rows: drop the last incomplete batch.

    Returns:
        Scalar, the mean over the B rows of this process.

    Raises:
        ValueError: not as many texts as images.
    """
    if text_embeds.shape != image_embeds.shape:
        raise ValueError(
            f"the contrastive loss needs as many texts as images, text i belonging to image i; got "
            f"{text_embeds.shape[0]} texts and {image_embeds.shape[0]} images."
        )
    texts, images, first = text_embeds, image_embeds, 0
    if across_processes and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        texts, images = GatherRows.apply(text_embeds), GatherRows.apply(image_embeds)
        first = dist.get_rank() * text_embeds.shape[0]
    target = torch.arange(text_embeds.shape[0], device=text_embeds.device) + first
    by_text = cross_entropy(text_embeds @ images.t() * scale, target)
    by_image = cross_entropy(image_embeds @ texts.t() * scale, target)
    return (by_text + by_image) / 2
