"""Model skeletons: what an encoder or a decoder does around its blocks.

An architecture's base model inherits a skeleton, builds its modules under the checkpoint's names, and says how it
embeds tokens (`embed`), where its blocks are (`blocks`) and what follows them (`final_norm`, `pool`).

Shapes: B batch, T tokens, P cached tokens, N packed tokens, S encoder tokens, C model width.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import Cache, DistributedConfig, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers import initialization as init
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPooling,
    BaseModelOutputWithPoolingAndCrossAttentions,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from hf_ext.configuration import ExtConfig
from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.packing import BUCKETED, FLASH, Packing
from hf_ext.layers.patterns.sliding_window import SlidingWindow
from hf_ext.layers.positions import Alibi
from hf_ext.layers.quantized import choose_kernels, unpack
from hf_ext.safety import check_files, check_size, refuse_more_than_memory, sizes_that_exist, tensor_bytes


def positional(*first: str) -> Callable[[type], type]:
    """Class decorator: `forward` takes these arguments first, in this order; the others follow in their own.

    The skeletons and heads have one order for all architectures, and official classes differ in it. A name that the
    inherited `forward` does not spell out is passed on by keyword; being in the signature, it is known to `Trainer`,
    which drops the columns of a data set that are not.
    """

    def decorate(cls: type) -> type:
        inherited = cls.forward
        anywhere = inspect.Parameter.POSITIONAL_OR_KEYWORD
        known = [
            p.replace(kind=p.kind if p.kind is p.VAR_KEYWORD else anywhere)
            for p in list(inspect.signature(inherited).parameters.values())[1:]
        ]
        spelled = {p.name: p for p in known if p.kind is anywhere}
        absent = {n: inspect.Parameter(n, anywhere, default=None, annotation=Tensor | None) for n in first}
        ordered = absent | spelled  # the names of `first` stand first, whoever declares them
        names = tuple(ordered)

        @functools.wraps(inherited)
        def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
            if len(args) > len(names):
                raise TypeError(f"forward takes {len(names)} positional arguments, {len(args)} were given.")
            return inherited(self, **dict(zip(names, args)), **kwargs)

        this = inspect.Parameter("self", anywhere)
        others = [p for p in known if p.kind is p.VAR_KEYWORD]
        forward.__signature__ = inspect.Signature([this, *ordered.values(), *others])
        cls.forward = forward
        return cls

    return decorate


class ExtPreTrainedModel(PreTrainedModel):
    """Base class of every model in this package: what the library needs to know, and one protocol for initial values.

    Initial values: a leaf module may carry `init_std`, which replaces the configuration's standard deviation for its
    weight; a module with computed buffers has `reset_buffers()`. Both are needed because the library calls
    `_init_weights` leaf by leaf, and because buffers that are in no file come back from loading as raw memory. A module
    whose parameters are not trained has `is_fixed`.
    """

    config: ExtConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement = ["past_key_values"]

    def __init__(self, config: ExtConfig, *args: object, **kwargs: object) -> None:
        check_size(self, config)
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: object,
        use_safetensors: bool | None = None,
        weights_only: bool = True,
        **kwargs: object,
    ) -> "ExtPreTrainedModel":
        """As the library's, with two things kept out: pickles that nobody asked for, and code inside those that were.

        Args:
            use_safetensors: `False` reads pickled weights (pytorch_model.bin); otherwise they are refused.
            weights_only: always true; tensors are all that is taken out of a pickle.

        Raises:
            OSError: no weights, or pickles only.
            ValueError: a configuration that is refused, or files that lead out of their folder.
        """
        if not weights_only:
            raise ValueError("weights_only=False would run whatever code a file holds; leave it out.")
        if not kwargs.get("gguf_file") and kwargs.get("state_dict") is None:
            if pretrained_model_name_or_path is not None:
                check_files(pretrained_model_name_or_path, use_safetensors)
            use_safetensors = use_safetensors is not False
        with sizes_that_exist():
            return super().from_pretrained(
                pretrained_model_name_or_path, *model_args, use_safetensors=use_safetensors, **kwargs
            )

    @staticmethod
    def _finalize_model_loading(model: PreTrainedModel, load_config: object, loading_info: object) -> object:
        # The library fills tensors whose shapes differ with new values before it says that they do.
        if loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes:
            name, found, expected = min(loading_info.mismatched_keys)
            others = len(loading_info.mismatched_keys) - 1
            raise RuntimeError(
                f"the weights do not fit the configuration: {name} has shape {tuple(found)} in the file and "
                f"{tuple(expected)} in the model{f', and {others} more differ' if others else ''}. Give the "
                "configuration that belongs to the weights, or ignore_mismatched_sizes=True to start these anew."
            )
        info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        for module in model.modules():  # loading makes a parameter that wants a gradient of any float tensor
            if getattr(module, "is_fixed", False):
                module.requires_grad_(False)
        return info

    def _move_missing_keys_from_meta_to_device(self, missing_keys: set[str], *args: object) -> None:
        # Everything that is in no file is allocated now, at the size that the configuration says.
        missing = [self.get_parameter_or_buffer(key) for key in missing_keys - self.all_tied_weights_keys.keys()]
        buffers = [buffer for _, buffer in self.named_non_persistent_buffers()]
        refuse_more_than_memory(tensor_bytes([*missing, *buffers]), "the tensors that the checkpoint does not hold")
        super()._move_missing_keys_from_meta_to_device(missing_keys, *args)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # The library finds out by searching the source for its own habits; here every attention layer is a core.
        return True

    def init_parallel_plans(self) -> None:
        # A configuration's plans name the parts of the whole model. The library gives them to an encoder or a decoder
        # inside it too, and warns of rules that match nothing there.
        super().init_parallel_plans()
        names = {replace_layer_number_by_wildcard(name) for name, _ in self.named_modules()}
        for kind in ("_tp_plan", "_fsdp_plan", "_pp_plan"):
            setattr(self, kind, {name: rule for name, rule in getattr(self, kind).items() if name in names})

    def _resolve_parallel_plans(self, distributed_config: DistributedConfig) -> tuple[dict[str, str], ...]:
        """The plans of the library, after a look at the heads: it would divide the width inside a head.

        Raises:
            ValueError: tensor parallelism over a number of processes that does not divide the heads.
        """
        tp_plan, *others = super()._resolve_parallel_plans(distributed_config)
        cores = {name: module for name, module in self.named_modules() if isinstance(module, AttentionCore)}
        for name, core in cores.items():
            if not any(rule.startswith(f"{name}.") for rule in tp_plan):
                continue
            for field, heads in core.head_counts.items():
                if heads % distributed_config.tp_size:
                    raise ValueError(
                        f"{field} ({heads}) of {name} cannot be divided among tp_size={distributed_config.tp_size} "
                        "processes: each needs whole heads. Use fewer processes, or a tp_plan without the attention "
                        "layers."
                    )
        return tp_plan, *others

    def _activation_checkpointing_enable(self, *args: object, **kwargs: object) -> None:
        # The library lets gradients into the first block past frozen embeddings of tokens only. Under reentrant
        # checkpointing, adapters over frozen patches would get no gradients.
        super()._activation_checkpointing_enable(*args, **kwargs)
        if self.main_input_name != "input_ids":
            self.disable_input_require_grads()
            self.enable_input_require_grads()

    def train(self, mode: bool = True) -> "ExtPreTrainedModel":
        """As every module's; layers of 4 bits are put in a state that can be trained, and evaluated."""
        super().train(mode)
        if getattr(self, "quantization_method", None) is not None:
            choose_kernels(self, training=mode)
        return self

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """As every module's; weights of 4 bits have the layout that loading expects."""
        self._unpack_layers()
        return super().state_dict(*args, **kwargs)

    def _unpack_layers(self) -> None:
        for layer in self.modules():
            unpack(layer)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> "ExtPreTrainedModel":
        """The library's, and the layers are again what the class has: it makes each a `Linear`, with a weight that is
        not in the files of GPT-2's transposed `Conv1D`."""
        self._unpack_layers()
        model = super().dequantize(dtype)
        with torch.device("meta"):
            outline = type(self)(self.config)
        for name, wanted in outline.named_modules():
            if isinstance(wanted, Conv1D) and isinstance(linear := model.get_submodule(name), nn.Linear):
                layer = Conv1D(wanted.nf, wanted.nx)
                layer.weight = nn.Parameter(linear.weight.t().contiguous())
                layer.bias = nn.Parameter(linear.bias)
                model.set_submodule(name, layer)
        return model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        init_std = getattr(module, "init_std", None)
        if init_std is None and isinstance(module, Conv1D):  # a linear layer that the library leaves to the model
            init_std = self.config.initializer_range
        if init_std is None:
            super()._init_weights(module)
        else:
            init.normal_(module.weight, mean=0.0, std=init_std)
            if getattr(module, "bias", None) is not None:  # embeddings have none
                init.zeros_(module.bias)
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()


class BlockStack:
    """A base model: tokens are embedded, pass through the blocks, and leave as hidden states.

    A mixin before `Ext<Arch>PreTrainedModel`, and not a model class itself: the library takes the configuration class
    from the first model class among the bases.
    """

    def can_pack(self, **kwargs: object) -> bool:
        """Whether tokens may be packed in this call: eager execution, an implementation that can attend to packed
        tokens, and no attention weights asked for (they would be those of the packed layout)."""
        return (
            not is_tracing()
            and self.config._attn_implementation in (*BUCKETED, *FLASH)
            and not kwargs.get("output_attentions", self.config.output_attentions)
        )

    def embed(self, **inputs: Tensor | int | None) -> Tensor:
        """Token and position embeddings, (B, T, C)."""
        raise NotImplementedError

    def blocks(self) -> Sequence[nn.Module]:
        """The blocks in order; each takes the hidden states first and returns them."""
        raise NotImplementedError

    def blocks_to_run(self) -> Iterable[nn.Module]:
        """The blocks of this call. Their number is read at every call: the library lowers it for a while to exit early
        (`assistant_early_exit`)."""
        return islice(self.blocks(), self.config.num_hidden_layers)

    def attends_to_encoder(self) -> bool:
        """Whether the blocks have cross-attention."""
        return getattr(self.config, "add_cross_attention", False)

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """What follows the last block."""
        return hidden_states

    def packed_rows(
        self, position_ids: Tensor | None, attention_mask: Tensor | None, batch: int, **kwargs: object
    ) -> Packing | None:
        """Boundaries of the sequences inside the rows, or None where every row is one sequence.

        The caller says so by positions that start again (`DataCollatorWithFlattening`), or by `cu_seq_lens_q`; a mask
        says that every row is one sequence. Keys and values in pages (`generate_batch`) have boundaries of their own.
        """
        if attention_mask is not None or kwargs.get("cache") is not None:
            return None
        if is_tracing(position_ids):  # a graph cannot depend on the lengths
            return None
        if kwargs.get("cu_seq_lens_q") is not None:
            return Packing.from_cu_seqlens(kwargs["cu_seq_lens_q"])
        if position_ids is None:
            return None
        return Packing.from_position_ids(position_ids, batch)

    @staticmethod
    def drop_unused(kwargs: dict[str, object], packing: Packing | None) -> None:
        """Take out what must not reach the attention functions."""
        names = ["return_dict", "skip_padding"]
        if packing is not None:  # the plan has taken their place
            names += ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
        for name in names:
            kwargs.pop(name, None)

    def check_encoder(self, encoder_hidden_states: Tensor | None) -> None:
        """Raise ValueError for an encoder's output that no block would look at."""
        if encoder_hidden_states is not None and not self.attends_to_encoder():
            raise ValueError(
                "encoder_hidden_states were given, but the model has no cross-attention; "
                "build it with add_cross_attention=True."
            )

    def cache_for(
        self,
        past_key_values: Cache | None,
        use_cache: bool | None,
        rows: Packing | None,
        encoder_hidden_states: Tensor | None,
    ) -> Cache | None:
        """The cache of this call: the caller's; a new one where it is wanted and of use, which it is not in training
        or for packed rows; with room for the encoder's keys and values where there is an encoder."""
        if past_key_values is None and use_cache and not self.training and rows is None:
            past_key_values = DynamicCache(config=self.config)
        plain = past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache)
        if plain and encoder_hidden_states is not None:
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        return past_key_values

    def encoder_mask(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
    ) -> Tensor | None:
        """The mask of cross-attention, as the attention implementation in use wants it; None where all is seen. It is
        kept in the cache: each step of decoding has the same."""
        if encoder_attention_mask is None:
            return None
        use = None
        if isinstance(past_key_values, EncoderDecoderCache) and not is_tracing(hidden_states):
            version = 0 if encoder_attention_mask.is_inference() else encoder_attention_mask._version
            use = (version, hidden_states.shape[:2], hidden_states.dtype, self.config._attn_implementation)
            kept = getattr(past_key_values, "encoder_mask", None)
            if kept is not None and kept[0] is encoder_attention_mask and kept[1] == use:
                return kept[2]
        mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        if use is not None:
            past_key_values.encoder_mask = (encoder_attention_mask, use, mask)
        return mask

    @capture_outputs
    def run_blocks(
        self,
        hidden_states: Tensor,
        *args: Tensor,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """hidden_states (B, T, C) or packed (1, N, C) -> the same shape. The library's hooks collect hidden states and
        attention weights on the way; `args` are tensors that gradient checkpointing must see as positional."""
        for block in self.blocks_to_run():
            hidden_states = block(hidden_states, *args, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.final_norm(hidden_states), past_key_values=past_key_values
        )

    def check_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: Cache | None,
    ) -> None:
        """Raise ValueError for inputs that contradict each other."""
        past_length = past.get_seq_length() if past is not None else None  # a tensor in caches of fixed length
        if (input_ids is None) == (inputs_embeds is None):
            given = "both were given" if input_ids is not None else "neither was given"
            raise ValueError(f"exactly one of input_ids and inputs_embeds is needed, {given}.")
        shape = tuple(input_ids.shape) if input_ids is not None else tuple(inputs_embeds.shape[:-1])
        if len(shape) != 2:
            name = "input_ids" if input_ids is not None else "inputs_embeds"
            expected = "(batch, tokens)" if input_ids is not None else "(batch, tokens, hidden_size)"
            found = tuple((input_ids if input_ids is not None else inputs_embeds).shape)
            raise ValueError(f"{name} must have shape {expected}, got {found}.")
        if is_tracing(input_ids if input_ids is not None else inputs_embeds):
            return  # nothing below may become part of a graph
        batch, tokens = shape
        if 0 in shape:
            raise ValueError(f"the input has shape {shape}: there is no token in it.")
        if position_ids is not None and tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
            raise ValueError(
                f"position_ids must have shape ({batch}, {tokens}) or (1, {tokens}), one for every token, got "
                f"{tuple(position_ids.shape)}."
            )
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            length = attention_mask.shape[1]
            # With a cache the mask may be longer: a prefix in the cache, or a cache of fixed length.
            fits = length == tokens if past_length is None else length >= tokens
            if isinstance(past_length, int):
                fits = length >= past_length + tokens
            if attention_mask.shape[0] != batch or not fits:
                cached = f" after {past_length} cached ones" if past_length else ""
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, but the input has {batch} rows of "
                    f"{tokens} tokens{cached}; it needs one row each and one entry for every token, cached ones "
                    "included."
                )


def inside_sequences(rows: Packing | None, batch: int) -> Callable | None:
    """What keeps the sequences of packed rows apart in a mask, for implementations that take no plan."""
    return packed_sequence_mask_function(rows.sequence_ids(batch)) if rows is not None else None


class EncoderModel(BlockStack):
    """Bidirectional encoder, or a decoder with the same blocks when `config.is_decoder`.

    When the batch has padding, only real tokens are computed: they are packed after the embedding, the blocks run on
    (1, N, C), and the hidden states are scattered back, zero at padding. `config.skip_padding = False` computes
    padding as well.
    """

    reads_first_token = False
    """Set by models whose head reads position 0. When padding stands there (left-padded rows), the batch is computed
    with its padding, so that such heads give what the official model gives."""

    first_position = 0
    """Position of a sequence's first token, from which packed sequences count when only their boundaries are given."""

    def is_causal(self) -> bool:
        """Whether the blocks are used as a decoder."""
        return self.config.is_decoder

    def pool(self, hidden_states: Tensor) -> Tensor | None:
        """Whole-sequence representation, (B, T, C) -> (B, C), where the architecture has one."""
        return None

    def padding_plan(
        self,
        attention_mask: Tensor | None,
        skip_padding: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> Packing | None:
        """The plan for computing real tokens only, or None where the batch is to be computed as it stands."""
        if skip_padding is None:
            skip_padding = self.config.skip_padding
        if not skip_padding or not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            return None
        if self.is_causal() or past_key_values is not None:
            return None
        if not self.can_pack(**kwargs) or is_tracing(attention_mask):
            return None
        if self.reads_first_token and not attention_mask[:, 0].all():
            return None
        return Packing.from_mask(attention_mask)

    def place_arguments(
        self,
        hidden_states: Tensor,
        *,
        position_ids: Tensor | None,
        past_length: int | Tensor,
        padded: Packing | None,
    ) -> dict[str, object]:
        """What tells the blocks where the tokens stand, once for all of them: keyword arguments of every block. None
        unless an architecture has positions beyond the embedding.

        Args:
            hidden_states: (B, T, C), or (1, N, C) where padding is left out.
            position_ids: (B or 1, T) of the padded batch, None for those that follow `past_length` tokens.
            padded: the plan by which padding was left out, or None.
        """
        return {}

    def attention_masks(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        past_key_values: Cache | None,
        rows: Packing | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The masks of self- and cross-attention, as the attention implementation in use wants them."""
        make, cache = create_bidirectional_mask, {}
        if self.is_causal():
            make, cache = create_causal_mask, {"past_key_values": past_key_values}
        mask = make(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            and_mask_function=inside_sequences(rows, hidden_states.shape[0]),
            **cache,
        )
        return mask, self.encoder_mask(hidden_states, encoder_hidden_states, encoder_attention_mask)

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        skip_padding: bool | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Hidden states of the last block, and the pooled representation where the model has a pooler.

        Args:
            input_ids: (B, T); or inputs_embeds: (B, T, C), without positions.
            attention_mask: (B, T), 1 at real tokens; a (B, 1, T, T) mask is used as it is.
            token_type_ids: (B, T) segment of each token, default 0.
            position_ids: (B or 1, T), default 0..T-1, in each sequence where `cu_seq_lens_q` separates them.
            encoder_hidden_states: (B, S, C) for cross-attention; encoder_attention_mask: (B, S).
            past_key_values: cache of a decoder.
            skip_padding: overrides `config.skip_padding` for this call.

        Returns:
            `last_hidden_state` (B, T, C), `pooler_output` (B, C) or None, `past_key_values`, and on request
            `hidden_states`, `attentions`, `cross_attentions`.

        Raises:
            ValueError: contradictory inputs, a token id or a position outside its table, an encoder's output for a
                model without cross-attention.
        """
        is_decoder = self.is_causal()
        if is_decoder:
            self.check_encoder(encoder_hidden_states)
        self.check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values)
        rows = None
        if past_key_values is None:
            given = input_ids if input_ids is not None else inputs_embeds
            rows = self.packed_rows(position_ids, attention_mask, given.shape[0], **kwargs)
            if rows is not None and position_ids is None:
                position_ids = rows.positions(given.shape[0]) + self.first_position
        past_key_values = self.cache_for(past_key_values, use_cache and is_decoder, rows, encoder_hidden_states)
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0

        hidden_states = self.embed(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_length=past_length,
        )
        packing = rows if self.can_pack(**kwargs) else None  # else the mask keeps the sequences apart
        padded = None  # the plan for putting padding back
        if rows is None:
            packing = padded = self.padding_plan(attention_mask, skip_padding, past_key_values, **kwargs)
        if padded is not None:
            hidden_states, attention_mask = padded.pack(hidden_states), None
        elif packing is None or encoder_attention_mask is not None:
            attention_mask, encoder_attention_mask = self.attention_masks(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values,
                rows,
            )
        self.drop_unused(kwargs, packing)
        outputs = self.run_blocks(
            hidden_states,
            *(() if encoder_hidden_states is None or not is_decoder else (encoder_hidden_states,)),
            attention_mask=attention_mask,
            encoder_attention_mask=encoder_attention_mask,
            **self.place_arguments(hidden_states, position_ids=position_ids, past_length=past_length, padded=padded),
            past_key_values=past_key_values,
            packing=packing,
            return_dict=True,
            **kwargs,
        )
        hidden_states, all_hidden_states = outputs.last_hidden_state, outputs.hidden_states
        if padded is not None:
            hidden_states = padded.unpack(hidden_states)
            if all_hidden_states is not None:
                # The last one is the same tensor; the rest is None where only some layers were asked for.
                all_hidden_states = tuple(x if x is None else padded.unpack(x) for x in all_hidden_states[:-1])
                all_hidden_states += (hidden_states,) if outputs.hidden_states[-1] is not None else (None,)
        result = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_states,
            pooler_output=self.pool(hidden_states),
            past_key_values=outputs.past_key_values if use_cache and is_decoder else None,
            hidden_states=all_hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )
        for name in self._can_record_outputs:
            if not hasattr(result, name) and outputs.get(name):  # recorded by this architecture only
                result[name] = outputs[name]
        return result


class ImageEncoderModel(BlockStack):
    """Bidirectional encoder of images: every image has the same number of patches, so there is no padding.

    `hidden_states` are the blocks' outputs as they are; `last_hidden_state` comes after the final norm.
    """

    def pool(self, hidden_states: Tensor) -> Tensor | None:
        """Whole-image representation, (B, T, C) -> (B, C), where the architecture has one."""
        return None

    def patches_of(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, N, C): the patches without the tokens before them."""
        raise NotImplementedError

    def patch_grid_of(self, pixel_values: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in images (B, channels, height, width)."""
        return tuple(size // patch for size, patch in zip(pixel_values.shape[2:], self.config.patch_shape))

    def feature_map(self, hidden_states: Tensor, pixel_values: Tensor) -> Tensor:
        """(B, T, C), of these images -> (B, C, rows, columns)"""
        return self.patches_of(hidden_states).transpose(1, 2).unflatten(2, self.patch_grid_of(pixel_values))

    @capture_outputs(tie_last_hidden_states=False)
    def run_blocks(self, hidden_states: Tensor, **kwargs: object) -> BaseModelOutputWithPooling:
        """hidden_states (B, T, C) -> the same shape."""
        for block in self.blocks_to_run():
            hidden_states = block(hidden_states, **kwargs)
        hidden_states = self.final_norm(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=self.pool(hidden_states))

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPooling:
        """Hidden states after the final norm, and the pooled representation where the model has a pooler.

        Args:
            pixel_values: (B, channels, height, width).
            bool_masked_pos: (B, N), True at patches to be replaced by the mask token.
            interpolate_pos_encoding: take images of any size of at least one patch, with learned positions
                interpolated to their grid; without it the size must be `config.image_size`.
            attention_mask: (B, T), 0 at tokens that none may see; the tokens before the patches count.

        Returns:
            `last_hidden_state` (B, T, C), `pooler_output` (B, C) or None, and on request `hidden_states` and
            `attentions`.

        Raises:
            ValueError: images of another size, of other channels or smaller than a patch; a mask that does not fit.
        """
        hidden_states = self.embed(
            pixel_values=pixel_values,
            bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=bool(interpolate_pos_encoding),
        )
        if attention_mask is not None:
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
        self.drop_unused(kwargs, None)
        return self.run_blocks(hidden_states, attention_mask=attention_mask, return_dict=True, **kwargs)


class DecoderModel(BlockStack):
    """Causal decoder.

    Rows may hold several sequences each: where `position_ids` start again, attention does not cross, and no mask of
    the packed length exists (`DataCollatorWithFlattening` makes such rows).
    """

    def rotation(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the positions for models with rotary positions, once for all blocks."""
        return None

    def masks(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        rows: Packing | None,
        packing: Packing | None,
    ) -> dict[str, object]:
        """What tells the blocks which tokens see which, once for all of them: keyword arguments of every block.

        Args:
            hidden_states: (B, T, C) after the embedding.
            attention_mask: as `forward` was given it.
            position_ids: (B or 1, T) as `forward` was given them, None for the default.
            past_key_values: cache, before this call's tokens are in it.
            rows: boundaries of packed sequences, None where every row is one.
            packing: `rows` where the attention implementation takes the boundaries and needs no mask, else None.
        """
        mask = self.causal_mask(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            rows=rows,
            packing=packing,
        )
        return {"attention_mask": mask}

    def causal_mask(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        rows: Packing | None,
        packing: Packing | None,
        make: Callable = create_causal_mask,
    ) -> Tensor | None:
        """The mask of layers that see all earlier tokens, as the attention implementation in use wants it.

        Args:
            make: the library's function that makes it; the others are those of `masks`.
        """
        if packing is not None:
            return None
        return make(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            and_mask_function=inside_sequences(rows, hidden_states.shape[0]),
            # While a graph is traced the positions cannot be read; the library then makes a mask from them.
            position_ids=position_ids if position_ids is not None and is_tracing(position_ids) else None,
        )

    def sliding_mask(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        rows: Packing | None,
        packing: Packing | None,
        **inputs: Tensor | None,
    ) -> Tensor | SlidingWindow | None:
        """The mask of layers that see the last `config.sliding_window` tokens (`WindowAttentionCore`): arguments as
        `masks`.

        Where sdpa computes a whole input, no mask of T * T exists: it is None where the window holds every sequence,
        and else the plan by which the attention goes block by block. Few queries after a cache, masks of the caller's
        own, traced graphs and other implementations have the library's mask.
        """
        window, tokens = self.config.sliding_window, hidden_states.shape[1]
        by_block = self.config._attn_implementation == "sdpa" and not is_tracing(attention_mask)
        real = None
        if packing is not None:
            tokens = max(packing.lengths)
        elif attention_mask is not None:
            by_block = by_block and isinstance(attention_mask, Tensor) and attention_mask.shape[1:] == (tokens,)
            if by_block and not attention_mask.all():
                real = attention_mask.to(hidden_states.device) != 0
        by_block = by_block and packing is rows and (past_key_values is None or past_key_values.get_seq_length() == 0)
        if by_block and tokens > window:
            return SlidingWindow(window, dtype=hidden_states.dtype, device=hidden_states.device, real=real)
        if by_block and real is None and tokens > 1:  # a single query would see the unused room of a static cache
            return None
        return self.causal_mask(
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            rows=rows,
            packing=packing,
            make=create_sliding_window_causal_mask,
            **inputs,
        )

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        token_type_ids: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Hidden states after the final norm.

        Args:
            input_ids: (B, T); or inputs_embeds: (B, T, C).
            attention_mask: (B, P + T), 1 at real tokens; a (B, 1, T, P + T) mask is used as it is.
            position_ids: (B or 1, T), default P..P+T-1 whatever the mask says (`generate` derives them from the
                mask of a left-padded batch), 0..n-1 in each sequence that `cu_seq_lens_q` bounds. Positions that
                start again inside a row separate packed sequences.
            past_key_values: cache; one is made when `use_cache` and the model is in eval mode. With an encoder's
                output it becomes an `EncoderDecoderCache`: go on with the one that is returned.
            token_type_ids: (B, T) segment of each token, for architectures that embed it; others pass over it.
            encoder_hidden_states: (B, S, C) for cross-attention; encoder_attention_mask: (B, S).

        Returns:
            `last_hidden_state` (B, T, C), `past_key_values`, and on request `hidden_states`, `attentions`,
            `cross_attentions`.

        Raises:
            ValueError: contradictory inputs, a token id or a position outside its table, an encoder's output for a
                model without cross-attention.
        """
        self.check_encoder(encoder_hidden_states)
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        self.check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values)
        given = input_ids if input_ids is not None else inputs_embeds
        rows = None
        if past_key_values is None:
            rows = self.packed_rows(position_ids, attention_mask, given.shape[0], **kwargs)
            if rows is not None and position_ids is None:  # only the boundaries were given
                position_ids = rows.positions(given.shape[0])
        packing = rows if rows is not None and self.can_pack(**kwargs) else None  # else the mask keeps them apart
        past_key_values = self.cache_for(past_key_values, use_cache, rows, encoder_hidden_states)

        hidden_states = self.embed(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_length=past_length,
        )
        masks = self.masks(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            rows=rows,
            packing=packing,
        )
        if position_ids is None:
            position_ids = (torch.arange(given.shape[1], device=given.device) + past_length)[None]
        self.drop_unused(kwargs, packing)
        return self.run_blocks(
            hidden_states,
            *(() if encoder_hidden_states is None else (encoder_hidden_states,)),
            **masks,
            encoder_attention_mask=self.encoder_mask(
                hidden_states, encoder_hidden_states, encoder_attention_mask, past_key_values
            ),
            rotation=self.rotation(hidden_states, position_ids),
            position_ids=position_ids,
            past_key_values=past_key_values,
            packing=packing,
            return_dict=True,
            **kwargs,
        )


class AlibiDecoderModel(DecoderModel):
    """Causal decoder whose attention has linear biases and no other positions (ALiBi, Press et al., 2021,
    https://arxiv.org/abs/2108.12409).

    The blocks' attention is an `AlibiAttentionCore`. A subclass sets `alibi`; where it is None there are no biases.
    """

    alibi: Alibi | None = None

    def key_index(
        self, attention_mask: Tensor | None, keys: int, past_length: int | Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor | int]:
        """Indices of the keys in their rows, and of a single query's own key.

        A padding mask counts real tokens only, as the official classes do. Where it is not at hand (none was given, or
        one of shape (B, 1, T, K)), places are counted: up to a number that is the same for all keys of a row, which
        softmax does not see, that is the same if all padding stands on one side.

        Returns:
            (B or 1, K), and (B, 1) or a number.
        """
        if attention_mask is None or attention_mask.dim() != 2:
            return torch.arange(keys, device=device)[None], past_length
        real = (attention_mask != 0).long()
        index = (real.cumsum(-1) - 1) * real
        own = index.amax(-1, keepdim=True)
        # A cache of fixed length has places that no token has reached.
        return nn.functional.pad(index, (0, keys - index.shape[1])), own

    def masks(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        rows: Packing | None,
        **kwargs: object,
    ) -> dict[str, object]:
        """As in `DecoderModel`, and the biases: as coordinates for queries and keys, or, for a single query that
        takes a mask, in the mask. Coordinates would copy the whole cache at each step.

        `generate_batch` gives a mask over all requests, (1, 1, T, K), with the keys of each side by side."""
        masks = super().masks(
            hidden_states, attention_mask=attention_mask, past_key_values=past_key_values, rows=rows, **kwargs
        )
        if self.alibi is None:
            return masks
        batch, tokens = hidden_states.shape[:2]
        keys, past_length = tokens, 0
        if past_key_values is not None:
            keys, past_length = past_key_values.get_mask_sizes(tokens, 0)[0], past_key_values.get_seq_length()
        if rows is not None:
            index, own = rows.positions(batch), None
        elif past_key_values is None and attention_mask is not None and attention_mask.dim() == 4:
            index, own = places_after_first_seen(attention_mask), 0
        else:
            index, own = self.key_index(attention_mask, keys, past_length, hidden_states.device)
        kind, dtype = hidden_states.device.type, hidden_states.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)  # what the projections return
        implementation = self.config._attn_implementation
        # "paged|eager" has scores for all heads anyway, and reads its keys where no coordinates can be appended.
        if rows is None and (tokens == 1 and implementation in BUCKETED or implementation == "paged|eager"):
            return {"attention_mask": add_bias(masks["attention_mask"], self.alibi.bias(index, own), dtype)}
        return {**masks, "alibi": self.alibi.columns(index, dtype)}


def places_after_first_seen(mask: Tensor) -> Tensor:
    """mask (B, 1, Q, K), bool or float -> (B, K) places of the keys, counted from the last key at or before each that
    is the first one of some query: where several texts lie side by side, each begins at 0."""
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min
    places = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape[0], -1)
    first = torch.zeros_like(places).scatter_(1, seen.long().argmax(-1), 1)
    return places - (places * first).cummax(-1).values


def add_bias(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, bool or float, and a bias, broadcastable to (B, H, Q, K) each -> a float mask."""
    least = torch.finfo(dtype).min
    if mask is None:
        return bias.to(dtype)
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, least).to(dtype)
    return (mask + bias).clamp(min=least).to(dtype)


class BiasedModel:
    """Blocks whose attention is a `BiasedAttentionCore`: biases by position, made once for all blocks. A mixin before
    `EncoderModel` or `DecoderModel`."""

    def adds_bias(self) -> bool:
        """Whether anything is added to the scores."""
        return True

    def position_bias(self, *, queries: int, keys: int, past_length: int | Tensor, device: torch.device) -> Tensor:
        """(1, H, Q, K), in a decoder with the smallest number where a key stands after its query."""
        raise NotImplementedError

    def run_blocks(
        self,
        hidden_states: Tensor,
        *args: Tensor,
        attention_mask: Tensor | None = None,
        packing: Packing | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As `BlockStack.run_blocks`; blocks take the bias, or None, after the hidden states and before `args`."""
        bias = None
        if self.adds_bias():
            tokens = hidden_states.shape[1] if packing is None else max(packing.lengths)
            keys, past_length = tokens, 0
            if past_key_values is not None:
                keys, past_length = past_key_values.get_mask_sizes(tokens, 0)[0], past_key_values.get_seq_length()
            place = {"queries": tokens, "keys": keys, "past_length": past_length}
            bias = self.position_bias(**place, device=hidden_states.device)
            kind, dtype = hidden_states.device.type, hidden_states.dtype
            # What the projections return.
            bias = bias.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype)
            if packing is not None:
                bias = packing.bias_of_buckets(bias)
            elif self.config._attn_implementation in BUCKETED:
                bias, attention_mask = add_bias(attention_mask, bias, bias.dtype), None
            else:
                kwargs["bias_apart"] = True
        return super().run_blocks(
            hidden_states,
            bias,
            *args,
            attention_mask=attention_mask,
            packing=packing,
            past_key_values=past_key_values,
            **kwargs,
        )


class BiasedDecoderModel(BiasedModel):
    """The same for decoders."""

    def causal_mask(
        self, hidden_states: Tensor, *, attention_mask: Tensor | None, rows: Packing | None, **inputs: object
    ) -> Tensor | None:
        """As `DecoderModel.causal_mask`; None without padding, since the bias says what is out of sight."""
        has_mask = attention_mask is not None or rows is not None
        if self.adds_bias() and not has_mask and self.config._attn_implementation in BUCKETED:
            return None
        return super().causal_mask(hidden_states, attention_mask=attention_mask, rows=rows, **inputs)


class BiasedEncoderModel(BiasedModel):
    """The same for encoders."""

    def padding_plan(self, attention_mask: Tensor | None, *args: object, **kwargs: object) -> Packing | None:
        """As `EncoderModel.padding_plan`, for padding at the ends of a row: between two tokens it counts as distance,
        and the batch is computed as it stands."""
        plan = super().padding_plan(attention_mask, *args, **kwargs)
        if plan is None or not self.adds_bias():
            return plan
        real = nn.functional.pad(attention_mask != 0, (1, 0))
        begins = (real[:, 1:] & ~real[:, :-1]).sum(-1)
        return plan if begins.max() <= 1 else None
