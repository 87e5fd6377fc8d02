"""Chat templates in the manner of those that checkpoints ship, and tokenizers that carry them."""

from __future__ import annotations

from pathlib import Path

from stages.prepare.chat import Chat
from tests.tiny import CHATML, make_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Trims every content; nothing follows the end of a turn."""

INST = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ bos_token }}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""No generation prompt of its own, a space on both sides of an answer, refuses system roles and two users in a row."""

PLAIN = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
"""Has no end of turn at all. (Its prompt ends with a space that byte-level tokenizers join with the next word.)"""

THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Takes the reasoning out of an answer once it is history."""

OPENS_THINKING = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
"""The generation prompt opens a reasoning block that a written answer does not have."""

DEAF = "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>user\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
"""Knows users alone and leaves everything else out without a word."""

CONSTANT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
"""Says the same whatever is asked."""

DIVIDES = "{{ 1 // 0 }}"
"""Fails with an error that is not jinja's own."""

DATED = "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + CHATML

SPECIAL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def chat_with(directory: Path, template: str, eos: str = "<|im_end|>") -> Chat:
    """A tiny tokenizer with `template`, as `Chat`; `eos` is the verifier's end-of-turn token."""
    from transformers import AutoTokenizer

    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory, template=template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.save_pretrained(directory)
    return Chat(directory, [tokenizer.convert_tokens_to_ids(eos)])
