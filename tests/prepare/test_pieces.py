"""Protects: a text tokenised a part at a time gives the ids of the whole text, and where that is not known the whole is what is tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stages.prepare.pieces import SPLITS_AT_WORDS, cuts_at_words, direct_encoder, separable
from tests.tiny import SPECIAL_TOKENS, TEXT, make_tokenizer

LLAMA3, QWEN = sorted(SPLITS_AT_WORDS, key=len, reverse=True)


def byte_level(pattern: str | None = None, digits: bool = False) -> Any:
    """Steps as checkpoints have them: GPT-2's pattern, or another before plain bytes."""
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])


def tokenizer(steps: Any, normalizer: Any = None, added: tuple[AddedToken, ...] = ()) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.normalizer, backend.decoder = steps, normalizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXT.splitlines(), trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet))
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


KINDS = {
    "gpt2": tokenizer(byte_level()),
    "smollm": tokenizer(byte_level(digits=True)),
    "llama3": tokenizer(byte_level(LLAMA3)),
    "qwen": tokenizer(byte_level(QWEN), normalizers.NFC()),
    "overlapping": tokenizer(byte_level(), added=(AddedToken("<|im_start|>user"), AddedToken(" the"), AddedToken("  "), AddedToken("I", normalized=False))),
}
texts = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *SPECIAL_TOKENS,
                " a",
                "a ",
                "the",
                " the ",
                "  ",
                " \n",
                "\n b",
                "\t c",
                " 12",
                "7 x",
                "don't",
                " 'll",
                "'s ok",
                "e\u0301",
                " \u0301a",
                "\u00a0 b",
                "é b",
            ]
        ),
        st.text(max_size=5),
        st.text("ab .,'\n<|>", max_size=12),
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_parts_give_the_ids_of_the_whole(name: str, text: str) -> None:
    tokenizer = KINDS[name]
    encode = ENCODERS[name]
    assert separable(tokenizer.backend_tokenizer)
    assert cuts_at_words(tokenizer.backend_tokenizer)
    assert encode(text) == tokenizer.encode(text, add_special_tokens=False)


ENCODERS = {name: direct_encoder(tokenizer) or pytest.fail(name) for name, tokenizer in KINDS.items()}


@pytest.mark.parametrize(
    ("steps", "normalizer", "added"),
    [
        (pre_tokenizers.Metaspace(prepend_scheme="first"), None, ()),
        (byte_level(), normalizers.Prepend("x"), ()),
        (byte_level(), None, (AddedToken("<pad>", lstrip=True),)),
        (byte_level(), None, (AddedToken("the", single_word=True),)),
    ],
    ids=["looks for the beginning", "writes at the beginning", "takes spaces", "looks around"],
)
def test_a_step_that_looks_beyond_its_part_is_given_the_whole(steps: Any, normalizer: Any, added: tuple[AddedToken, ...]) -> None:
    whole = tokenizer(steps, normalizer, added)
    assert not separable(whole.backend_tokenizer)
    encode = direct_encoder(whole)
    assert encode is not None
    for text in ("a the<|im_end|> b  <pad> the\n the", "<|im_start|>the the"):
        assert encode(text) == whole.encode(text, add_special_tokens=False)


def test_an_unknown_pattern_may_join_words() -> None:
    joins = tokenizer(byte_level(r"a b|\s+|\S+"))
    assert separable(joins.backend_tokenizer)
    assert not cuts_at_words(joins.backend_tokenizer)
    encode = direct_encoder(joins)
    assert encode is not None
    assert encode("a b a b<|im_end|>a b") == joins.encode("a b a b<|im_end|>a b", add_special_tokens=False)


def test_a_tokenizer_with_an_encode_of_its_own_keeps_it(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)

    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, *arguments: Any, **options: Any) -> Any:
            return super()._encode_plus(*arguments, **options)

    assert direct_encoder(AutoTokenizer.from_pretrained(str(tmp_path))) is not None
    assert direct_encoder(Own(tokenizer_object=KINDS["gpt2"].backend_tokenizer)) is None
