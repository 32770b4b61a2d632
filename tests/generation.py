"""What `generate` does with our classes and with the stock ones, one function per check.

As in `harness.py`, each check takes a `Subject`, and both classes load the same file. What `harness.py` checks for
every head (greedy, beams, a static cache, left padding, an assistant) is not repeated here.

Shapes: B batch, T tokens.
"""

import copy
import io
import threading
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
from harness import (
    Subject,
    as_prompt,
    assert_close,
    build,
    generation_pair,
    no_warning,
    ours_and_official_folders,
    pipeline,
    prompt_length,
    prompts,
    randomise,
    scratch,
    subjects,
    tensors_of,
    tiny_tokenizer,
    write_official,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
)

from hf_ext.layers.attention import CrossAttentionCore

NEW = 10
LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")  # how configurations name the longest input


def generating() -> list[Subject]:
    """The language models that generate, in their first configuration; those with another's blocks are left to the
    contract."""
    return subjects("causal", "aligned", configs="one", where=lambda s: s.generates and s.case.blocks_of is None)


def answering() -> list[Subject]:
    """The encoder-decoders that generate, in their first configuration."""
    return subjects("seq2seq", configs="one")


def answering_text() -> list[Subject]:
    """Those of them that read text, which starts from any token."""
    return [subject for subject in answering() if subject.is_text]


def windowed() -> list[Subject]:
    """Those whose configuration has a window, each configuration."""
    names = ("sliding_window", "window_size", "attention_window")
    return subjects("causal", where=lambda s: s.generates and any(s.fields.get(name) for name in names))


def generate(model: torch.nn.Module, batch: dict, seed: int = 7, **options: object) -> Tensor:
    """Token ids, (rows, T), with the random numbers of `seed`."""
    torch.manual_seed(seed)
    return model.generate(**batch, **{"max_new_tokens": NEW, **options})


def attempt(function: Callable, *args: object, **options: object) -> object:
    """What a call returns or raises."""
    try:
        return function(*args, **options)
    except Exception as error:
        return error


def possible(subject: Subject, options: dict) -> dict:
    """The options without those that the stock class cannot follow, or follows to other tokens by a fault of its own:
    a cache of fixed length, a prompt in pieces. They say how tokens are computed and change none."""
    lacking = []
    if not subject.case.stock_keeps_cache:
        lacking = ["cache_implementation", "prefill_chunk_size"]
        options = {**options, "use_cache": False}
    elif "static" in subject.case.wrong_in_stock and options.get("cache_implementation") == "static":
        lacking = ["cache_implementation"]
    return {name: value for name, value in options.items() if name not in lacking}


# --- decoding, caches ---------------------------------------------------------------------------------------------

DECODING = {
    "top-p": {"do_sample": True, "top_p": 0.8, "temperature": 0.7},
    "min-p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "typical": {"do_sample": True, "typical_p": 0.7, "repetition_penalty": 1.4},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "no cache": {"do_sample": True, "use_cache": False},
    "beams that end": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.4, "early_stopping": True},
    "guidance": {"guidance_scale": 1.6},
    "in pieces": {"prefill_chunk_size": 4},
    "in pieces, beams": {"prefill_chunk_size": 2, "num_beams": 2},
    "in pieces, static": {"prefill_chunk_size": 3, "cache_implementation": "static"},
    "static, beams": {"cache_implementation": "static", "num_beams": 3},
}


def check_decoding(subject: Subject) -> None:
    """Ways of decoding that ask the model for more than the next logits: other tokens, or an error."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    wrong = subject.case.wrong_in_stock
    for mode, options in DECODING.items():
        if subject.seq2seq and (mode == "guidance" or "in pieces" in mode):
            continue  # the library takes the answer for the question there, or cuts the mask of the question
        if "end" in mode:  # a third of the vocabulary ends a row
            options = {**options, "eos_token_id": list(range(5, ours.config.vocab_size, 3))}
        expected = generate(stock, batch, **(possible(subject, options) if mode not in wrong else {}))
        actual = generate(ours, batch, **options)
        assert torch.equal(actual, expected), mode


def check_stopping(subject: Subject) -> None:
    """Rows that end at different steps are padded; a model that looks at the padding goes on differently."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    for step in (2, 3, 5):
        ends = list(range(5, ours.config.vocab_size, step))
        for options in ({}, {"do_sample": True}):
            expected = generate(stock, batch, eos_token_id=ends, **options)
            assert torch.equal(generate(ours, batch, eos_token_id=ends, **options), expected)
    if subject.is_speech:
        return  # a temperature makes Whisper sample, whatever `do_sample` says
    # Settings of sampling beside a greedy search: the library warns, and neither class takes notice.
    options = {"num_beams": 3, "do_sample": False, "temperature": 0.4, "top_p": 0.9}
    alarms = []
    for model in (stock, ours):
        with no_warning(allow=(".",)) as alarm:
            generate(model, batch, **options)
        alarms.append([m for m in alarm.messages if "hf_ext" not in m])
    assert alarms[0] == alarms[1]
    assert torch.equal(generate(ours, batch, **options), generate(stock, batch, num_beams=3))


def check_caches(subject: Subject) -> None:
    """Caches that keep, move or cut keys and values in their own way."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    for implementation in ("dynamic", "static", "offloaded", "offloaded_static"):
        for options in ({}, {"num_beams": 2}):
            options = {**options, "cache_implementation": implementation}
            actual = attempt(generate, ours, batch, **options)
            if isinstance(actual, Exception):  # offloading wants an accelerator
                assert "offloaded" in implementation and not torch.accelerator.is_available(), actual
            else:
                assert torch.equal(actual, generate(stock, batch, **possible(subject, options))), implementation


def check_quantised_cache(subject: Subject, backend: str) -> None:
    """Keys and values in four bits."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    # Groups that divide what tiny heads hold, and so few exact tokens that the quantised ones are read.
    settings = {"backend": backend, "nbits": 4, "q_group_size": 2, "residual_length": 2}
    options = {"cache_implementation": "quantized", "cache_config": settings}
    answers = []
    for model in (stock, ours):
        try:
            answers.append(generate(model, batch, **options).tolist())
        except ValueError as error:  # the library's word about sliding windows
            answers.append(str(error))
    if "sliding_attention" in (getattr(ours.config, "layer_types", None) or ()):
        assert "QuantizedCache" in answers[1]  # GPT-Neo's local layers keep the window only; the stock ones keep all
    else:
        assert answers[0] == answers[1]


def check_window_cache(subject: Subject) -> None:
    """A cache that keeps only the window must give what all keys give, on both sides of the window."""
    stock, ours = generation_pair(subject)
    rows, batch = prompts(subject, ours.config, lengths=(3, 12))
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}):
        expected = generate(stock, batch, max_new_tokens=20, **possible(subject, options))
        assert torch.equal(generate(ours, batch, max_new_tokens=20, **options), expected), options
    cached = generate(ours, {"input_ids": rows[-1]}, max_new_tokens=20)
    assert torch.equal(cached, generate(ours, {"input_ids": rows[-1]}, max_new_tokens=20, use_cache=False))


def check_continued_cache(subject: Subject) -> None:
    """A chat hands the cache of one turn to the next."""
    stock, ours = generation_pair(subject)
    rows, _ = prompts(subject, ours.config, lengths=(4, 6))
    results = []
    for model in (stock, ours):
        first = model.generate(rows[0], max_new_tokens=4, return_dict_in_generate=True)
        both = torch.cat([first.sequences, rows[1]], -1)
        again = model.generate(both, max_new_tokens=NEW)
        if model is ours or subject.case.stock_keeps_cache:
            cached = model.generate(both, past_key_values=first.past_key_values, max_new_tokens=NEW)
            assert torch.equal(cached, again)
        results.append(again)
    assert torch.equal(*results)


def check_assistants(subject: Subject) -> None:
    """Proposed tokens are refused by cutting the cache; what is left must be what was there."""
    stock, ours = generation_pair(subject)
    rows, _ = prompts(subject, ours.config)
    ids = torch.cat([rows[-1], rows[-1][:, :4]], -1)  # repeats itself, so that a look-up finds something
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    helper, folder = copy.deepcopy(stock), scratch()
    randomise(helper, seed=1)
    helper.tie_weights()
    helper.save_pretrained(folder)
    helpers = [model.from_pretrained(folder).eval() for model in (subject.stock, subject.ours)]
    greedy = generate(ours, batch, max_new_tokens=16)
    modes = {
        "look-up": [{"prompt_lookup_num_tokens": 3}] * 2,
        "sampled look-up": [{"prompt_lookup_num_tokens": 3, "do_sample": True}] * 2,
        "sampled assistant": [{"assistant_model": helper, "do_sample": True} for helper in helpers],
    }
    for mode, (stock_options, options) in modes.items():
        actual = generate(ours, batch, max_new_tokens=16, **options)
        # Without a cache the stock class takes no proposals, and by itself it draws other random numbers.
        if subject.case.stock_keeps_cache:
            assert torch.equal(actual, generate(stock, batch, max_new_tokens=16, **stock_options)), mode
        assert "sampled" in mode or torch.equal(actual, greedy), mode
    assert torch.equal(greedy, generate(stock, batch, max_new_tokens=16))
    # Not every stock class can leave early; the library looks for the blocks inside the base model, and T5 has none.
    if hasattr(ours, ours.base_model_prefix):
        assert torch.equal(generate(ours, batch, max_new_tokens=16, assistant_early_exit=1), greedy)


def check_early_exit(subject: Subject) -> None:
    """Layer skipping (Elhoushi et al., 2024, https://arxiv.org/abs/2404.16710) runs the first blocks only, by setting
    the number of layers for a while; a model that does not notice proposes nothing cheaper than its own tokens."""
    if subject.kind == "aligned":
        return  # the field counts the encoder's layers, and the decoder has all of its own in the stock class too
    _, ours = generation_pair(subject)
    rows, _ = prompts(subject, ours.config)
    calls = []
    for block in ours.base_model.blocks():
        block.register_forward_hook(lambda *_: calls.append(1))
    depth = ours.config.num_hidden_layers
    ours(input_ids=rows[0])
    assert len(calls) == depth
    calls.clear()
    ours.config.num_hidden_layers = 1
    ours(input_ids=rows[0])
    assert len(calls) == 1
    ours.config.num_hidden_layers = depth


def check_compiled_decoding(subject: Subject, backend: str) -> None:
    """A decode step that breaks the graph, or is compiled again for every token."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    expected = generate(stock, batch, **possible(subject, {"cache_implementation": "static"}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = CompileConfig(fullgraph=True, backend=backend, mode=None if backend != "inductor" else "default")
    options._compile_all_devices = True
    actual = generate(ours, batch, cache_implementation="static", compile_config=options)
    assert torch.equal(actual, expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 2, f"{graphs} graphs"
    again = generate(ours, batch, cache_implementation="static", compile_config=options)
    assert torch.equal(again, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "compiled again"


def check_compiled_blocks(subject: Subject) -> None:
    """Blocks compiled one by one, as Accelerate does to compile a deep model in the time of a single block: what is
    computed once for all of them comes from outside their graphs."""
    stock, ours = generation_pair(subject)
    for cache in ("dynamic", "static"):
        options = possible(subject, {"cache_implementation": cache, "disable_compile": True})
        for rows in (1, None):  # a single row goes ways of its own
            batch = {name: x[:rows] for name, x in prompts(subject, ours.config)[1].items()}
            expected = generate(stock, batch, **options)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            for block in ours.base_model.blocks():
                block.compile(backend="eager")
            assert torch.equal(generate(ours, batch, **options), expected)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def check_continuous_batching(subject: Subject) -> None:
    """Requests of unequal lengths in one packed row, with keys and values in pages."""
    _, ours = generation_pair(subject)
    rows, _ = prompts(subject, ours.config, lengths=(2, 7, 11, 5))
    requests = [row[0].tolist() for row in rows]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=32)

    def tokens(model: torch.nn.Module) -> list[list[int]]:
        outputs = model.generate_batch(requests, generation_config=config, continuous_batching_config=pages)
        return [x.generated_tokens for x in sorted(outputs.values(), key=lambda x: int(x.request_id.split("_")[-1]))]

    # The stock class is no measure: some take no notice of the pages and give other tokens, in silence.
    expected = [generate(ours, {"input_ids": row}, max_new_tokens=6)[0, row.shape[1] :].tolist() for row in rows]
    for attn in ("sdpa", "eager"):
        ours.set_attn_implementation(attn)
        assert tokens(ours) == expected, attn


# --- encoder-decoders ---------------------------------------------------------------------------------------------


def check_encoder_once(subject: Subject) -> None:
    """The encoder runs once, and its output is projected to keys and values once for each block of the decoder."""
    _, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    runs, projections = [], []
    ours.get_encoder().register_forward_hook(lambda *_: runs.append(1))
    for module in ours.modules():
        if isinstance(module, CrossAttentionCore):
            project = module.project_encoder
            module.project_encoder = lambda states, project=project: projections.append(1) or project(states)
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        runs.clear(), projections.clear()
        generate(ours, batch, **options)
        assert len(runs) == 1, options
        assert len(projections) == len(ours.get_decoder().blocks()), options


def check_decoder_prompt(subject: Subject) -> None:
    """Answers that go on from given tokens, and an encoder's output that was computed before."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    start = torch.full((3, 1), ours.config.decoder_start_token_id)
    prompt = torch.cat([start, torch.arange(6, 15).view(3, 3)], -1)
    for options in ({}, {"num_beams": 3}):
        expected = generate(stock, {**batch, "decoder_input_ids": prompt}, **options)
        assert torch.equal(expected[:, :4], prompt)
        assert torch.equal(generate(ours, {**batch, "decoder_input_ids": prompt}, **options), expected)
        encoded = ours.get_encoder()(**batch, return_dict=True)
        given = {"encoder_outputs": encoded, "attention_mask": batch["attention_mask"]}
        assert torch.equal(generate(ours, {**given, "decoder_input_ids": prompt}, **options), expected)


def check_forced_tokens(subject: Subject) -> None:
    """First and last tokens that the configuration of a checkpoint forces."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    for model in (stock, ours):
        model.generation_config.forced_bos_token_id = 7
        model.generation_config.forced_eos_token_id = 9
    for options in ({}, {"num_beams": 3}):
        actual = generate(ours, batch, **options)
        assert torch.equal(actual, generate(stock, batch, **options))
        assert (actual[:, 1] == 7).all() and (actual[:, -1] == 9).all()


# --- prompts ------------------------------------------------------------------------------------------------------


def check_right_padding(subject: Subject) -> None:
    """The library warns; the tokens are those of the stock class."""
    stock, ours = generation_pair(subject)
    # What a pad gives that sees no token at all is the implementation's own: then none is further from its text.
    lengths = {"lengths": (8, 9, 7)} if "right" in subject.own_padding("sdpa") else {}
    rows, _ = prompts(subject, ours.config, **lengths)
    pad = ours.config.pad_token_id
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=pad) for row in rows])
    batch = {"input_ids": ids, "attention_mask": (ids != pad).long()}
    results = []
    for model in (stock, ours):
        with no_warning(allow=("right-padding",)) as alarm:
            results.append(generate(model, batch))
        assert any("right-padding" in message for message in alarm.messages)
    assert torch.equal(*results)


def check_no_prompt(subject: Subject) -> None:
    """No prompt at all starts from the first token of a text; a prompt of no tokens is an error."""
    stock, ours = generation_pair(subject)
    assert torch.equal(generate(ours, {}), generate(stock, {}))
    for empty in (torch.zeros(1, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)):
        expected, actual = (attempt(generate, model, {"input_ids": empty}) for model in (stock, ours))
        if isinstance(expected, Tensor):
            assert torch.equal(actual, expected)
        else:
            # The library itself stumbles over the second one, before it calls the model.
            assert isinstance(actual, ValueError | type(expected)), f"{actual!r} for a prompt of {tuple(empty.shape)}"


def check_embedded_prompt(subject: Subject) -> None:
    """Prompts given as embeddings, as multimodal models and prompt tuning give them."""
    stock, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    results = []
    for model in (stock, ours):
        # Of ours for both: where words are scaled, the official table of Marian gives them unscaled.
        embeds = ours.get_input_embeddings()(batch["input_ids"])
        options = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
        if model is stock and not subject.case.stock_keeps_cache:  # and then it takes no such prompt either
            results.append(generate(model, batch)[:, batch["input_ids"].shape[1] :])
        else:
            results.append(generate(model, options))
    assert torch.equal(*results)


def check_long_prompt(subject: Subject) -> None:
    """A prompt, or a text that has grown, longer than the positions: where the stock class fails inside torch, the
    field and its value are named, or, where no parameter depends on it, the result is that of a stock class with a
    longer limit; elsewhere the result is that of the stock class."""
    stock, ours = generation_pair(subject)
    field = next((name for name in LENGTHS if getattr(ours.config, name, None)), None)
    if field is None:
        return
    limit = getattr(ours.config, field)
    for length, new in ((limit + 1, 2), (limit - 1, 5)):
        ids = torch.arange(length)[None] % (ours.config.vocab_size - 5) + 5
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected, actual = (attempt(generate, model, batch, max_new_tokens=new) for model in (stock, ours))
        if isinstance(expected, Exception) and isinstance(actual, Tensor):
            longer = build(subject.stock, subject, **{field: 2 * limit})
            longer.generation_config = stock.generation_config
            expected = generate(longer, batch, max_new_tokens=new)
        if isinstance(expected, Tensor):
            assert torch.equal(actual, expected)
        else:
            assert isinstance(actual, ValueError), f"{length} tokens: {actual!r}"
            official = type(ours.config).attribute_map.get(field, field)
            assert official in str(actual) and str(limit) in str(actual) and "tokenizer" not in str(actual), actual


# --- outputs, text ------------------------------------------------------------------------------------------------


def check_returned_dictionary(subject: Subject) -> None:
    """Hidden states, attentions and scores of every step."""
    stock, ours = generation_pair(subject, attn="eager")
    _, batch = prompts(subject, ours.config)
    wanted = {"output_scores": True, "output_hidden_states": True, "output_attentions": True}
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        common = {"max_new_tokens": 3, "return_dict_in_generate": True, **wanted}
        expected = generate(stock, batch, **common, **possible(subject, options))
        actual = generate(ours, batch, **common, **options)
        assert set(actual) - {"past_key_values"} == set(expected) - {"past_key_values"}
        parts = ("hidden_states", "attentions")
        if subject.seq2seq:
            parts = ("decoder_hidden_states", "decoder_attentions", "cross_attentions")
        for name in ("scores", *parts):
            for mine, reference in zip(actual[name], expected[name], strict=True):
                mine, reference = (x if isinstance(x, tuple) else (x,) for x in (mine, reference))
                pairs = zip(tensors_of({name: mine}).items(), tensors_of({name: reference}).values(), strict=True)
                for (what, value), other in pairs:
                    if name.endswith("hidden_states"):  # of padding nothing is promised
                        value, other = value[:, -1:], other[:, -1:]
                    elif name.endswith("attentions"):
                        value, other = value[:, :, -1:], other[:, :, -1:]
                        if value.shape != other.shape:  # keys that nobody sees: room of a cache, tokens it dropped
                            value, other = value[value > 0], other[other > 0]
                    assert_close(value, other, what)


def letter_tokenizer(config: object) -> PreTrainedTokenizerFast:
    """One letter for each id of the vocabulary."""
    letters = [chr(i) for i in range(ord("a"), ord("a") + 700) if chr(i).isalpha()][: config.vocab_size]
    tokenizer = Tokenizer(models.WordLevel({x: i for i, x in enumerate(letters)}, unk_token=letters[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=letters[config.pad_token_id])


def check_text(subject: Subject) -> None:
    """Words that end a text, and the text as it comes."""
    stock, ours = generation_pair(subject)
    rows, _ = prompts(subject, ours.config)
    tokenizer = letter_tokenizer(ours.config)
    batch = as_prompt(subject, rows[-1])
    start = prompt_length(subject, rows[-1])
    full = generate(ours, batch)[0, start:]
    letters = tokenizer.convert_ids_to_tokens(full.tolist())
    for stop in (letters[3], ["".join(letters[5:7]), "not there"]):
        expected, actual = (generate(m, batch, stop_strings=stop, tokenizer=tokenizer) for m in (stock, ours))
        assert torch.equal(actual, expected)
        assert actual.shape[1] < start + NEW
    text = tokenizer.decode(full)
    printed = io.StringIO()
    with redirect_stdout(printed):
        generate(ours, batch, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert printed.getvalue().strip() == text
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(target=ours.generate, kwargs={**batch, "max_new_tokens": NEW, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()


CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"


def check_chat(subject: Subject) -> None:
    """A folder saved by us, with a chat template: messages in, a message out, and the same from the stock class."""
    ours, official = ours_and_official_folders(subject)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    chats = [
        [{"role": "big", "content": "the cat sat"}, {"role": "small", "content": "on the mat"}],
        [{"role": "big", "content": "a dog ran"}],
    ]
    results = []
    for folder in (ours, official):
        tokenizer.save_pretrained(folder)
        with no_warning():
            pipe = pipeline(subject, "text-generation", folder, repaired=folder == official)
            results.append(pipe(chats, max_new_tokens=5, do_sample=False, batch_size=2))
    assert results[0] == results[1]
    assert results[0][0][0]["generated_text"][-1]["role"] == "assistant"


def check_generation_config(subject: Subject) -> None:
    """Settings of generation are a file of their own, which must come through saving and the official export."""
    _, ours = generation_pair(subject)
    ours.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=11, max_new_tokens=5, pad_token_id=0, eos_token_id=[3, 4],
        **({"decoder_start_token_id": 5} if subject.seq2seq else {}),
    )  # fmt: skip
    folder, official = scratch(), scratch() / "export"
    ours.save_pretrained(folder)
    write_official(ours, official)
    rows, _ = prompts(subject, ours.config)
    batch = as_prompt(subject, rows[0])
    expected = generate(ours, batch, max_new_tokens=None)
    for cls, place in ((subject.ours, folder), (subject.stock, official), (subject.ours, official)):
        model = cls.from_pretrained(place)
        assert model.generation_config.to_diff_dict() == ours.generation_config.to_diff_dict()
        assert torch.equal(generate(model, batch, max_new_tokens=None), expected)
