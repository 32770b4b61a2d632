"""XLM-RoBERTa: RoBERTa's heads in one of its configurations, and what official files look like."""

import transformers
from torch import Tensor

from cases.base import Case
from cases.roberta import ROBERTA_BASE, roberta_configs, roberta_heads, roberta_legacy_keys


class XLMRobertaForCausalLM(transformers.XLMRobertaForCausalLM):
    """The stock class, generating with the positions that its own forward takes."""

    def _prepare_position_ids_for_generation(self, *args: object) -> Tensor:
        return super()._prepare_position_ids_for_generation(*args) + self.config.pad_token_id + 1


XLM_ROBERTA_BASE = {
    **ROBERTA_BASE,
    "architectures": ["XLMRobertaForMaskedLM"],
    "model_type": "xlm-roberta",
    "output_past": True,
    "position_embedding_type": "absolute",
    "transformers_version": "4.17.0.dev0",
    "use_cache": True,
    "vocab_size": 250002,
}

CASE = Case(
    blocks_of="roberta",
    is_decoder=False,
    heads=roberta_heads("XLMRoberta"),
    # The blocks are RoBERTa's and tested there.
    configs={name: fields for name, fields in roberta_configs(seed=1).items() if name == "gelu"},
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"pad_token_id": None}, "pad_token_id must be at least 0"),
        ({"max_position_embeddings": 2}, "pad_token_id + 2 (3)"),
        ({"model_type": "roberta"}, "reads 'xlm-roberta'"),
    ),
    official_files={"xlm-roberta-base": XLM_ROBERTA_BASE},
    legacy_keys=roberta_legacy_keys,
    stock_classes={"ExtXLMRobertaForCausalLM": XLMRobertaForCausalLM},
    positions_from_ids=True,
    first_position=lambda config: config.pad_token_id + 1,
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
