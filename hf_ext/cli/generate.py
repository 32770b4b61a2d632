"""`hf-ext generate`: text from a causal language model or an encoder-decoder, streamed; a prompt, standard input, or a
conversation."""

import sys
from typing import Annotated

import typer

from hf_ext.cli.models import find_model, quiet, torch_dtype


def generate(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Folder or Hub id; a PEFT adapter's folder brings its base model along.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue or to transform; default: stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a user's message into the template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat or in a conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, help="Above 0: sample; 0: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Sample from this share of probability.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="Least probability, relative to the top.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(min=0.01)] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beam search; not streamed.")] = 1,
    seed: Annotated[int | None, typer.Option(help="For sampling that can be repeated.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Folder or Hub id of a PEFT adapter.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")] = "auto",
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print tokens as they come.")] = True,
) -> None:
    """Generate text. Greedy unless a sampling option is given; without a prompt at a terminal, a conversation."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if temperature == 0 and len(sampling) > 1:
        others = ", ".join("--" + name.replace("_", "-") for name in sampling if name != "temperature")
        raise typer.BadParameter(f"0 means greedy, which contradicts {others}", param_hint="'--temperature'")
    if temperature == 0:
        sampling = {}
    dtype = torch_dtype(dtype)
    conversation = prompt is None and sys.stdin.isatty()
    if system is not None and not (chat or conversation):
        raise typer.BadParameter("needs --chat", param_hint="'--system'")
    if prompt is None and not conversation:
        prompt = sys.stdin.read().removesuffix("\n")
    if prompt is not None and not prompt:
        raise ValueError("the prompt is empty; give one with --prompt or on standard input.")

    found = find_model(model)
    if found.adapter is not None:
        if adapter is not None:
            raise typer.BadParameter(f"{model} is itself an adapter; give its base model", param_hint="'--adapter'")
        if not found.base:
            raise ValueError(f"{model} names no base model; give it as MODEL, and this folder as --adapter.")
        adapter, found = found.source, find_model(found.base)
    if adapter is not None and find_model(adapter).adapter is None:
        raise ValueError(f"{adapter} holds no adapter_config.json; it is no PEFT adapter.")
    from hf_ext.inspection.inputs import is_causal_head, is_seq2seq_head

    if "num_mel_bins" in found.config:
        raise ValueError(
            f"{found.source} transcribes sound: use transformers.pipeline('automatic-speech-recognition', MODEL) "
            "inside hf_ext.takeover()."
        )
    seq2seq = is_seq2seq_head(found.class_name)
    if not seq2seq and not is_causal_head(found.class_name):
        raise ValueError(
            f"{found.source} was saved from {found.class_name or 'a bare model'}, which does not generate text; "
            "give a causal language model or an encoder-decoder."
        )
    if seq2seq and (chat or conversation):
        raise ValueError(
            f"{found.source} is an encoder-decoder, which transforms a text and does not chat: give the text with "
            "--prompt or on standard input, without --chat."
        )
    with quiet(context):
        session = (_Transformation if seq2seq else _Session)(found.source, adapter, dtype)
        settings = {"max_new_tokens": max_new_tokens, "do_sample": bool(sampling), "num_beams": num_beams, **sampling}
        if repetition_penalty is not None:
            settings["repetition_penalty"] = repetition_penalty
        if seed is not None:
            from transformers import set_seed

            set_seed(seed)
        stream = stream and num_beams == 1  # the streamer cannot: a beam may still be dropped
        if conversation:
            _converse(session, system, settings, stream)
        elif chat:
            session.answer(session.with_template(_messages(system, prompt)), settings, stream)
        else:
            session.answer(session.tokenizer(prompt, return_tensors="pt"), settings, stream)


def _messages(system: str | None, prompt: str | None = None) -> list[dict]:
    start = [{"role": "system", "content": system}] if system is not None else []
    return start + ([{"role": "user", "content": prompt}] if prompt is not None else [])


class _Session:
    """A loaded model and its tokenizer."""

    auto_class = "AutoModelForCausalLM"

    def __init__(self, source: str, adapter: str | None, dtype):
        import torch
        import transformers
        from transformers import AutoTokenizer

        import hf_ext

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, TypeError) as error:  # what it raises depends on which file is missing
            raise ValueError(f"{source} has no usable tokenizer; put its tokenizer files there.") from error
        with hf_ext.takeover():
            self.model = getattr(transformers, self.auto_class).from_pretrained(source, dtype=dtype)
        if adapter is not None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, adapter)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def with_template(self, messages: list[dict]):
        if not self.tokenizer.chat_template:
            raise ValueError("this model has no chat template, it continues text: give --prompt, without --chat.")
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    def answer(self, inputs, settings: dict, stream: bool) -> str:
        """Generates, prints, and returns the new text.

        Args:
            inputs: `input_ids` and `attention_mask`, both (1, T).
            settings: for `generate`.
            stream: print tokens as they come.
        """
        from transformers import TextStreamer

        inputs = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        length = inputs["input_ids"].shape[1]
        if length == 0:
            raise ValueError("the prompt holds no tokens; give a longer one.")
        room = self.room(length)
        if room is not None:
            settings = {**settings, "max_new_tokens": min(settings["max_new_tokens"], room)}
        if self.model.generation_config.pad_token_id is None:
            end = self.model.generation_config.eos_token_id
            end = end[0] if isinstance(end, list) else end
            padding = self.tokenizer.pad_token_id
            settings = {**settings, "pad_token_id": padding if padding is not None else end}
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        ids = self.model.generate(**inputs, **settings, streamer=streamer)
        text = self.tokenizer.decode(self.new_ids(ids[0], length), skip_special_tokens=True)
        if not stream:
            print(text)
        return text

    def room(self, length: int) -> int | None:
        """How many tokens may be generated after a prompt of `length`, None where positions are unlimited.

        Raises:
            ValueError: none.
        """
        from hf_ext.inspection.inputs import longest_input

        limit = longest_input(self.model.config)
        if limit is not None and length >= limit:
            raise ValueError(f"the prompt of {length} tokens leaves no room in the {limit} positions of this model.")
        return None if limit is None else limit - length

    def new_ids(self, ids, length: int):
        """(T,) as `generate` returned them -> those after the prompt."""
        return ids[length:]


class _Transformation(_Session):
    """An encoder-decoder: the prompt is read by the encoder, and the decoder writes from its first position on."""

    auto_class = "AutoModelForSeq2SeqLM"

    def room(self, length: int) -> int | None:
        from hf_ext.inspection.inputs import longest_input

        limit = longest_input(self.model.config)
        if limit is not None and length > limit:
            raise ValueError(f"the prompt of {length} tokens exceeds the {limit} positions of this model.")
        return None if limit is None else limit - 1  # the start token has one

    def new_ids(self, ids, length: int):
        return ids[1:]


def _converse(session: _Session, system: str | None, settings: dict, stream: bool) -> None:
    """Turns until the input ends; each answer becomes part of the next prompt."""
    from rich.console import Console

    console = Console(stderr=True)  # standard output carries the answers only
    messages = _messages(system)
    session.with_template(_messages(None, "."))  # says at once when there is no template
    console.print("[dim]Empty line or Ctrl-D ends; /new starts over.[/]")
    while True:
        try:
            said = console.input("[bold]> [/]").strip()
        except EOFError:
            return
        if not said:
            return
        if said == "/new":
            messages = _messages(system)
            continue
        messages.append({"role": "user", "content": said})
        messages.append(
            {"role": "assistant", "content": session.answer(session.with_template(messages), settings, stream)}
        )
