"""Tokenizer and chat template of nano Ling, and of the random miniature.

Byte-level BPE, so every text has tokens and nothing is unknown. Digits stand alone: a model can only learn to carry if
"128" is three tokens. The chat template follows Ling-3.0's markers, `<role>HUMAN</role>…<|role_end|>`, and has its
thinking switch: `enable_thinking` (default on) ends the prompt inside an open `<think>`, off ends it after an empty
one. SGLang's `--reasoning-parser ling3` then takes everything up to `</think>` as reasoning. `<think>` and `</think>`
are ordinary added tokens, not special ones: a server that skips special tokens must still see them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|role_end|>"
SPECIAL = [END_OF_TEXT, END_OF_TURN, "<role>", "</role>"]
MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]

CHAT_TEMPLATE = """\
{%- set thinking = 'on' if enable_thinking is not defined or enable_thinking else 'off' -%}
{%- set first = messages[0] if messages and messages[0]['role'] == 'system' else none -%}
<role>SYSTEM</role>{{ first['content'] + '\\n' if first else '' }}detailed thinking {{ thinking }}<|role_end|>
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
<role>HUMAN</role>{{ message['content'] }}<|role_end|>
{%- elif message['role'] == 'assistant' -%}
<role>ASSISTANT</role>{{ message['content'].split('</think>')[-1].lstrip('\\n') }}<|role_end|>
{%- elif message['role'] != 'system' -%}
{{ raise_exception('nano Ling knows the roles system, user and assistant, not ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<role>ASSISTANT</role>{{ '<think>' if thinking == 'on' else '<think></think>' }}
{%- endif -%}
"""


def prompt(question: str, thinking: bool = True) -> str:
    """What CHAT_TEMPLATE makes of one user message; kept as a function because training needs no Jinja."""
    switch = "on" if thinking else "off"
    head = f"<role>SYSTEM</role>detailed thinking {switch}<|role_end|><role>HUMAN</role>{question}<|role_end|>"
    return head + ("<role>ASSISTANT</role><think>" if thinking else "<role>ASSISTANT</role><think></think>")


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_markers(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return tokenizer


def bytes_only() -> Tokenizer:
    """256 byte tokens and the 12 markers, no merges: ids 0…267."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return _add_markers(_finish(Tokenizer(models.BPE(vocab=vocab, merges=[]))))


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-pair merges learned from `texts`; the same texts give the same tokenizer."""
    tokenizer = _finish(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _add_markers(tokenizer)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as a Hugging Face loader expects them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": SPECIAL[2:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
