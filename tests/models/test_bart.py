"""What BART, mBART and Marian promise beyond the contract, and what they refuse."""

import copy

import pytest
import torch
from harness import assert_close, build, pair, randomise, subjects
from transformers import (
    BartConfig,
    BartModel,
    GenerationMixin,
    MBartConfig,
    MBartForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ext import (
    ExtBartConfig,
    ExtBartForCausalLM,
    ExtBartForConditionalGeneration,
    ExtBartForSequenceClassification,
    ExtBartModel,
    ExtMarianConfig,
    ExtMarianMTModel,
    ExtMBartConfig,
    ExtMBartForConditionalGeneration,
    modeling,
)
from hf_ext.layers.attention import CrossAttentionCore
from hf_ext.models.bart.modeling_bart import ExtBartCrossAttention
from hf_ext.seq2seq import Seq2SeqLMModel

SIZES = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 12,
}  # fmt: skip
IDS = torch.tensor([[0, 5, 6, 7, 2], [0, 8, 2, 1, 1]])
MASK = (IDS != 1).long()
SEQ2SEQ = subjects("base", configs="one", where=lambda s: s.seq2seq)


@pytest.fixture
def model() -> ExtBartForConditionalGeneration:
    return ExtBartForConditionalGeneration(ExtBartConfig(**SIZES)).eval()


def test_blocks_are_left_out_in_training_as_in_the_stock_class() -> None:
    """Layer drop draws a number for each block, between the dropout of its neighbours."""
    fields = {**SIZES, "encoder_layers": 4, "decoder_layers": 4, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.5}
    stock = BartModel(BartConfig(**fields)).train()
    ours = ExtBartModel(ExtBartConfig(**fields)).train()
    ours.load_state_dict(stock.state_dict())
    ours.config.skip_padding = False
    for seed in range(4):
        outputs = []
        for candidate in (ours, stock):
            torch.manual_seed(seed)
            outputs.append(candidate(IDS, MASK).last_hidden_state)
        assert_close(*outputs, f"seed {seed}")
    stock.eval(), ours.eval()
    assert_close(ours(IDS, MASK).last_hidden_state, stock(IDS, MASK).last_hidden_state, "all blocks")


@pytest.mark.parametrize("subject", SEQ2SEQ, ids=str)
def test_cross_attention_reads_real_tokens_only(subject) -> None:
    """Outside generation keys and values are made of the encoder's real tokens, and of none else."""
    model = build(subject.ours, subject)
    inputs = subject.inputs(model.config, "right")
    seen = []
    cross = next(module for module in model.decoder.modules() if isinstance(module, CrossAttentionCore))
    keys = cross.k if hasattr(cross, "k") else cross.k_proj
    keys.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[:2].numel()))
    with torch.no_grad():
        model(**inputs, use_cache=False)
        model(**inputs, use_cache=False, skip_padding=False)
        model(**inputs, use_cache=True)
    real, places = int(inputs["attention_mask"].sum()), inputs["attention_mask"].numel()
    assert seen == [real, places, places]


def test_two_labels_stay_two(tmp_path) -> None:
    """The library leaves two labels out of the file as its own default; BART's default is three."""
    ExtBartForSequenceClassification(ExtBartConfig(**SIZES, num_labels=2)).save_pretrained(tmp_path)
    assert ExtBartForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 2
    assert ExtBartConfig().num_labels == BartConfig().num_labels == 3
    assert ExtMBartConfig().num_labels == MBartConfig().num_labels == 2


def test_decoder_alone_leaves_the_configuration_as_it_was() -> None:
    config = ExtBartConfig(**SIZES)
    decoder = ExtBartForCausalLM(config)
    assert decoder.config.is_decoder and not decoder.config.is_encoder_decoder
    assert config.is_encoder_decoder and not config.is_decoder
    assert ExtBartModel(config)(IDS).last_hidden_state.shape == (2, 5, 16)


def test_decoder_deeper_than_the_encoder_generates_alone() -> None:
    """Caches are made by the configuration, whose number of layers is the encoder's."""
    config = ExtBartConfig(**{**SIZES, "decoder_layers": 3, "decoder_attention_heads": 4})
    model = ExtBartForCausalLM(config).eval()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    expected = model.generate(IDS[:1, :3], use_cache=False, **options)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(IDS[:1, :3], cache_implementation=cache, **options), expected)


def test_language_goes_in_front() -> None:
    """mBART's labels end with the token of the language, from which the decoder starts."""
    fields = {**SIZES, "pad_token_id": 1}
    ours = ExtMBartForConditionalGeneration(ExtMBartConfig(**fields))
    stock = MBartForConditionalGeneration(MBartConfig(**fields))
    labels = torch.tensor([[5, 6, 2, 30], [7, 2, 31, -100]])
    expected = torch.tensor([[30, 5, 6, 2], [31, 7, 2, 31]])
    assert torch.equal(ours.prepare_decoder_input_ids_from_labels(labels), expected)
    assert torch.equal(stock.prepare_decoder_input_ids_from_labels(labels), expected)


def test_two_vocabularies_are_resized_apart() -> None:
    fields = {**SIZES, "pad_token_id": 1, "decoder_start_token_id": 1, "decoder_vocab_size": 50}
    model = ExtMarianMTModel(ExtMarianConfig(**fields, share_encoder_decoder_embeddings=False)).eval()
    before = model(IDS, decoder_input_ids=IDS).logits
    model.resize_token_embeddings(44)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (44, 50)
    assert_close(model(IDS, decoder_input_ids=IDS).logits, before, "more words to read")
    model.resize_decoder_token_embeddings(53)
    assert model.config.decoder_vocab_size == model.lm_head.out_features == 53
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert_close(model(IDS, decoder_input_ids=IDS).logits[..., :50], before, "more words to write")
    shared = ExtMarianMTModel(ExtMarianConfig(**{**fields, "decoder_vocab_size": None}))
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        shared.resize_decoder_token_embeddings(44)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_mask_of_the_encoder_is_made_once(model, options, monkeypatch) -> None:
    """Not in each step of decoding; a cache that is used with another mask, or with one that changed, has a new one."""
    make, made = modeling.create_bidirectional_mask, []

    def count(**inputs: object) -> torch.Tensor:
        made.append("encoder_hidden_states" in inputs)
        return make(**inputs)

    monkeypatch.setattr(modeling, "create_bidirectional_mask", count)
    model.generate(IDS, attention_mask=MASK, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)
    assert sum(made) == 1
    if not options:
        mask = torch.ones_like(MASK)
        encoded = model.get_encoder()(IDS)
        first = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=IDS[:, :1], use_cache=True)
        mask[1, 3:] = 0
        for given in (mask, mask.clone(), torch.ones_like(MASK)):
            logits = []
            for keep in (True, False):
                cache = copy.deepcopy(first.past_key_values)
                cache.encoder_mask = first.past_key_values.encoder_mask if keep else None
                step = {"encoder_outputs": encoded, "decoder_input_ids": IDS[:, 1:2], "past_key_values": cache}
                logits.append(model(attention_mask=given, **step).logits)
            assert torch.equal(*logits)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_beams_share_what_they_read(model, attention, use_cache, options, monkeypatch) -> None:
    """The encoder's output is projected once for each text, and the beams attend to it as they do to copies of it."""
    randomise(model, seed=1)
    model.set_attn_implementation(attention)
    rows, results = [], []
    project = ExtBartCrossAttention.project_encoder

    def count(self: ExtBartCrossAttention, states: torch.Tensor) -> tuple:
        rows.append(states.shape[0])
        return project(self, states)

    monkeypatch.setattr(ExtBartCrossAttention, "project_encoder", count)
    repeat = GenerationMixin._expand_inputs_for_generation
    asked = {"max_new_tokens": 6, "use_cache": use_cache, "return_dict_in_generate": True, "output_logits": True}
    asked["decoder_input_ids"] = torch.tensor([[2, 4, 9], [2, 30, 11]])
    if attention == "eager":
        asked["output_attentions"] = True
    for share in (True, False):
        if not share:
            monkeypatch.setattr(Seq2SeqLMModel, "_expand_inputs_for_generation", repeat)
            monkeypatch.delattr(Seq2SeqLMModel, "_reorder_cache")
        torch.manual_seed(1)
        results.append(model.generate(IDS, attention_mask=MASK, **{"do_sample": False, **asked, **options}))
        assert (set(rows) == {2}) == share
        rows.clear()
    ours, repeated = results
    assert torch.equal(ours.sequences, repeated.sequences)
    for mine, expected in zip(ours.logits, repeated.logits, strict=True):
        assert_close(mine, expected, "logits")
    if attention == "eager":
        for mine, expected in zip(ours.cross_attentions, repeated.cross_attentions, strict=True):
            for one, other in zip(mine, expected, strict=True):
                assert_close(one, other, "weights")


@pytest.mark.parametrize("attention", ["eager", "sdpa", "of_the_user"])
def test_several_answers_to_one_text(model, attention, monkeypatch) -> None:
    """Loss and gradients are those of a batch in which the text is repeated for each answer."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_the_user", sdpa_attention_forward)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "of_the_user", sdpa_mask)
    randomise(model, seed=1)
    model.set_attn_implementation(attention)
    answers = torch.tensor([[5, 6, 2], [9, 2, -100], [7, 7, 2], [11, 12, 2]])
    found = []
    for copies in (1, 2):
        model.zero_grad()
        ids, mask = (x.repeat_interleave(copies, 0) for x in (IDS, MASK))
        output = model(ids, attention_mask=mask, labels=answers, output_logits=True)
        output.loss.backward()
        found.append((output, {name: x.grad for name, x in model.named_parameters()}))
    (shared, gradients), (repeated, expected) = found
    assert len(shared.encoder_last_hidden_state) == len(IDS)
    assert_close(shared.loss, repeated.loss, "loss")
    assert_close(shared.logits, repeated.logits, "logits")
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], name)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_several_rows_with_a_mask_of_their_own(model, attention) -> None:
    """What of the text each place of the answer may see."""
    randomise(model, seed=1)
    model.set_attn_implementation(attention)
    answers, states = torch.randint(3, 40, (6, 3)), torch.randn(2, 5, 16)
    seen = torch.rand(2, 1, 3, 5) < 0.6
    seen[..., 0] = True
    mask = seen if attention == "sdpa" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = [
        model(
            encoder_outputs=(states.repeat_interleave(copies, 0),),
            attention_mask=mask.repeat_interleave(copies, 0),
            decoder_input_ids=answers,
        ).logits
        for copies in (1, 3)
    ]
    assert_close(*logits, "logits")
    assert (logits[0] - model(encoder_outputs=(states,), decoder_input_ids=answers).logits).abs().max() > 1e-3


def test_other_kernels_have_rows_for_beams(model) -> None:
    """Flex and flash attention make their masks for as many rows as there are queries."""
    for attention, rows in (("sdpa", 2), ("eager", 2), ("flex_attention", 6)):
        model.config._attn_implementation = attention
        given = {"encoder_outputs": BaseModelOutput(torch.randn(2, 5, 16)), "attention_mask": MASK}
        _, inputs = model._expand_inputs_for_generation(3, True, IDS[:, :1], **given)
        assert len(inputs["encoder_outputs"].last_hidden_state) == len(inputs["attention_mask"]) == rows


# --- what is refused ----------------------------------------------------------------------------------------------


def test_labels_longer_than_the_positions(model) -> None:
    with pytest.raises(ValueError, match=r"13 tokens.*12.*max_position_embeddings=12"):
        model(IDS, labels=torch.full((2, 13), 5))


def test_rows_that_do_not_belong_together(model) -> None:
    with pytest.raises(ValueError, match="3 rows and the encoder's output 2"):
        model(IDS, decoder_input_ids=torch.full((3, 2), 5))


def test_no_start_token(model) -> None:
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        model(IDS, labels=IDS)
    model.config.decoder_start_token_id, model.config.pad_token_id = 2, None
    with pytest.raises(ValueError, match="pad_token_id"):
        model(IDS, labels=IDS)


def test_labels_beside_a_decoder_input(model) -> None:
    """The decoder's input is used as it is; labels of another length are an error."""
    given = torch.tensor([[2, 9, 9], [2, 8, 8]])
    loss = model(IDS, decoder_input_ids=given, labels=IDS[:, :3]).loss
    logits = model(IDS, decoder_input_ids=given).logits
    assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, :3].flatten()), "loss")
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 3\)"):
        model(IDS, decoder_input_ids=given, labels=IDS)
    with pytest.raises(ValueError, match="both decoder_input_ids and decoder_inputs_embeds"):
        model(IDS, decoder_input_ids=given, decoder_inputs_embeds=torch.zeros(2, 3, 16))


def test_nothing_to_read(model) -> None:
    with pytest.raises(ValueError, match="no token in it"):
        model(torch.zeros(2, 0, dtype=torch.long), decoder_input_ids=IDS)
    with pytest.raises(ValueError, match="input_ids and inputs_embeds"):
        model(decoder_input_ids=IDS)
    with pytest.raises(ValueError, match="decoder has no input"):
        model(inputs_embeds=torch.zeros(2, 5, 16))
    with pytest.raises(ValueError, match="encoder's output has 5 tokens"):
        model(encoder_outputs=(torch.zeros(2, 5, 16),), attention_mask=torch.ones(2, 4), decoder_input_ids=IDS)


def test_rows_without_an_end() -> None:
    classifier = ExtBartForSequenceClassification(ExtBartConfig(**SIZES)).eval()
    with pytest.raises(ValueError, match="eos_token_id=2"):
        classifier(IDS.masked_fill(IDS == 2, 9))
    with pytest.raises(ValueError, match="needs input_ids"):
        classifier(inputs_embeds=torch.zeros(2, 5, 16))
    ids = torch.tensor([[0, 5, 2, 7, 2], [0, 8, 2, 1, 1]])  # two ends and one
    alone = classifier(ids[:1]).logits
    assert_close(classifier(ids, MASK).logits[:1], alone, "the last end of each row")


def test_words_to_write_are_looked_up_among_their_own() -> None:
    fields = {**SIZES, "pad_token_id": 1, "decoder_start_token_id": 1, "decoder_vocab_size": 30}
    model = ExtMarianMTModel(ExtMarianConfig(**fields, share_encoder_decoder_embeddings=False)).eval()
    with pytest.raises(ValueError, match="decoder_vocab_size=30"):
        model(IDS, decoder_input_ids=IDS + 29)


def test_a_row_without_tokens_disturbs_no_other() -> None:
    """It has nothing to attend to."""
    subject = SEQ2SEQ[0]
    stock, ours = pair(subject)
    inputs = subject.inputs(ours.config, "right")
    inputs["attention_mask"][1] = 0
    others = torch.tensor([0, 2, 3])
    with torch.no_grad():
        expected, found = stock(**inputs)[0], ours(**inputs, use_cache=False)[0]
    assert found.isfinite().all()
    assert_close(found[others], expected[others], "the other rows")
