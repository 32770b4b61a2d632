"""Change one part of a loaded model: give some layers of a LLaMA an output gate, and keep everything else working.

    python examples/swap_attention.py --model HuggingFaceTB/SmolLM2-135M --layers 0 1 2

The part is the attention of the layers in `--layers`. Its subclass lets every head scale its own output by what the
token asks for, before the output projection (gated attention, Qiu et al., 2025, https://arxiv.org/abs/2505.06708; the
factor here is 2 sigmoid(gate), one per head). With the gate's weights at zero, as they start, the factor is one: the
model computes what it did before, and training moves it from there.

What the subclass inherits is the point: heads, rotation, cache, kernels and packed rows are the core's, so `generate`,
`Trainer` and saving work without a line for them. Without `--model` a small LLaMA with random weights is made; the text
is CPython's own reference, one byte a token.
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    DataCollatorWithFlattening,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_ext import ExtLlamaConfig, ExtLlamaForCausalLM
from hf_ext.models.llama.modeling_llama import ExtLlamaAttention


class GatedAttention(ExtLlamaAttention):
    """LLaMA's attention, each head's output times 2 sigmoid(gate(x)).

    Shapes: B batch, T tokens, K keys, C model width, H heads, D head width.
    """

    def __init__(self, config: ExtLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(config.hidden_size, config.num_attention_heads)
        self.gate.init_std = 0.0  # a gate that no file holds starts at zero: a factor of one

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), **kwargs)
        factor = 2 * self.gate(x).sigmoid()  # (B, T, H)
        mixed = mixed.unflatten(-1, (-1, self.head_dim)) * factor[..., None]  # (B, T, H, D)
        return self.o_proj(mixed.flatten(-2)), weights


class GatedLlamaForCausalLM(ExtLlamaForCausalLM, GenerationMixin):
    """LLaMA with gates in the layers that `config.gated_layers` lists; reads official files and its own."""

    def __init__(self, config: ExtLlamaConfig) -> None:
        super().__init__(config)
        for i in getattr(config, "gated_layers", ()):
            self.model.layers[i].self_attn = GatedAttention(config, i)
        self.post_init()


def make_checkpoint(folder: str) -> str:
    """An official LLaMA checkpoint with random weights, and a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(["<end>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def train(model: nn.Module, rows: list[dict], steps: int, folder: str) -> tuple[float, float]:
    """A few steps of the whole model on packed rows; the loss on the same rows before and after."""
    settings = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=2e-3, prediction_loss_only=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(
        model, settings, train_dataset=rows, eval_dataset=rows, data_collator=DataCollatorWithFlattening()
    )
    trainer.remove_callback(PrinterCallback)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]


def main(argv: list[str] | None = None) -> dict:
    """Swap, train, generate, save, reload; print and return what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", help="folder or Hub id of a LLaMA; default: a small one with random weights")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 2], help="layers to give a gate")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=20)
    args = parser.parse_args(argv)

    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.model or make_checkpoint(folder)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        plain = ExtLlamaForCausalLM.from_pretrained(checkpoint).eval()
        config = ExtLlamaConfig.from_pretrained(checkpoint)
        if not all(0 <= i < config.num_hidden_layers for i in args.layers):
            parser.error(f"--layers {args.layers}: the model has layers 0 to {config.num_hidden_layers - 1}.")
        config.gated_layers = sorted(set(args.layers))  # saved with the others, and found again on loading
        model = GatedLlamaForCausalLM.from_pretrained(checkpoint, config=config).eval()
        inputs = tokenizer("The statement", return_tensors="pt", return_token_type_ids=False).to(model.device)
        with torch.no_grad():
            change = (model(**inputs).logits - plain(**inputs).logits).abs().max().item()

        texts = [topics[name][:200] for name in sorted(topics)][:64]
        rows = [{"input_ids": tokenizer(text).input_ids} for text in texts]
        before, after = train(model, rows, args.steps, f"{folder}/run")
        options = {"max_new_tokens": args.new_tokens, "do_sample": False}
        cached, whole = (model.cpu().eval().generate(**inputs, use_cache=c, **options) for c in (True, False))
        model.save_pretrained(f"{folder}/gated")
        again = GatedLlamaForCausalLM.from_pretrained(f"{folder}/gated")
    attention = [layer.self_attn for layer in again.model.layers]
    result = {
        "change": change,  # of the logits, by the swap alone
        "before": before,
        "after": after,
        "gates": {i: a.gate.weight.abs().max().item() for i, a in enumerate(attention) if hasattr(a, "gate")},
        "cache": torch.equal(cached, whole),
        "reloaded": all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values())),
    }
    print(f"The swap changed the logits by {change:.1e}; loss {before:.3f} before training, {after:.3f} after.")
    print(f"Largest weight of each gate: {', '.join(f'{g:.3f} in layer {i}' for i, g in result['gates'].items())}.")
    print(f"Greedy tokens with and without cache equal: {result['cache']}; reloaded equal: {result['reloaded']}.")
    return result


if __name__ == "__main__":
    main()
