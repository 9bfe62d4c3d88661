"""Small models of the kinds that transformers trains in its tests of DeepSpeed, by the names that
they have on a hub: the class of a model, its type and what its configuration says."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from support.local_models import VOCABULARY

WIDTH = 16
SENTINELS = 100
PIECES = ("<pad>", "</s>", "<unk>", "\u2581", *string.ascii_letters, *string.digits, *".,:?-()'")
"""The tokens of a T5 before its sentinels: a text is its letters."""
CAUSAL, CLASSES = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
PAIRS, MASKED = "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
ANSWERS, IMAGES = "AutoModelForQuestionAnswering", "AutoModelForImageClassification"
_ENCODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
_PAIRS = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
}
_PROPHET = {
    "hidden_size": WIDTH,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2}
T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": len(PIECES) + SENTINELS,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_TINY = "hf-internal-testing/tiny-random-"
ZOO: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "hf-internal-testing/tiny-albert": (MASKED, "albert", _ENCODER | {"embedding_size": 8}),
    "sshleifer/bart-tiny-random": (PAIRS, "bart", _PAIRS),
    "hf-internal-testing/tiny-bert": (CLASSES, "bert", _ENCODER),
    f"{_TINY}bigbird_pegasus": (
        CAUSAL,
        "bigbird_pegasus",
        _PAIRS | {"attention_type": "original_full"},
    ),
    f"{_TINY}blenderbot": (CAUSAL, "blenderbot", _PAIRS),
    "bigscience/bigscience-small-testing": (
        CAUSAL,
        "bloom",
        {"hidden_size": WIDTH, "n_layer": 2, "n_head": 2},
    ),
    f"{_TINY}deberta": (MASKED, "deberta", _ENCODER),
    f"{_TINY}deberta-v2": (MASKED, "deberta-v2", _ENCODER),
    "sshleifer/tiny-distilbert-base-cased": (
        MASKED,
        "distilbert",
        {"dim": WIDTH, "hidden_dim": 32, "n_heads": 2, "n_layers": 2},
    ),
    f"{_TINY}flaubert": (MASKED, "flaubert", {"emb_dim": WIDTH, "n_layers": 2, "n_heads": 2}),
    "stas/tiny-wmt19-en-de": (
        PAIRS,
        "fsmt",
        _PAIRS | {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    ),
    f"{_TINY}funnel": (
        MASKED,
        "funnel",
        {"d_model": WIDTH, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1]},
    ),
    "hf-internal-testing/tiny-electra": (MASKED, "electra", _ENCODER | {"embedding_size": WIDTH}),
    f"{_TINY}gpt_neo": (
        CAUSAL,
        "gpt_neo",
        {
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    f"{_TINY}gptj": (CAUSAL, "gptj", _GPT | {"rotary_dim": 4}),
    "hf-internal-testing/tiny-layoutlm": (MASKED, "layoutlm", _ENCODER),
    f"{_TINY}led": (ANSWERS, "led", _PAIRS | {"attention_window": [8, 8]}),
    f"{_TINY}longformer": (ANSWERS, "longformer", _ENCODER | {"attention_window": [8, 8]}),
    "stas/tiny-m2m_100": (PAIRS, "m2m_100", _PAIRS),
    "sshleifer/tiny-marian-en-de": (PAIRS, "marian", _PAIRS),
    "sshleifer/tiny-mbart": (PAIRS, "mbart", _PAIRS),
    f"{_TINY}mobilebert": (
        ANSWERS,
        "mobilebert",
        _ENCODER | {"embedding_size": 8, "intra_bottleneck_size": WIDTH},
    ),
    f"{_TINY}mpnet": (ANSWERS, "mpnet", _ENCODER),
    "stas/pegasus-cnn_dailymail-tiny-random": (PAIRS, "pegasus", _PAIRS),
    f"{_TINY}prophetnet": (CAUSAL, "prophetnet", _PROPHET),
    "sshleifer/tiny-distilroberta-base": (ANSWERS, "roberta", _ENCODER),
    f"{_TINY}squeezebert": (ANSWERS, "squeezebert", _ENCODER | {"embedding_size": WIDTH}),
    "patrickvonplaten/t5-tiny-random": (PAIRS, "t5", T5),
    "google-t5/t5-small": (PAIRS, "t5", T5),
    f"{_TINY}t5-v1.1": (PAIRS, "t5", T5 | {"feed_forward_proj": "gated-gelu"}),
    f"{_TINY}vit": (IMAGES, "vit", _ENCODER | {"image_size": 30, "patch_size": 10}),
    "hf-internal-testing/tiny-xlm-roberta": (
        CAUSAL,
        "xlm-roberta",
        _ENCODER | {"is_decoder": True},
    ),
    "sshleifer/tiny-xlnet-base-cased": (
        CLASSES,
        "xlnet",
        {"d_model": WIDTH, "n_layer": 2, "n_head": 2, "d_inner": 32},
    ),
}
