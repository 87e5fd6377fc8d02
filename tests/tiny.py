"""A random Llama of a few hundred thousand weights with its own tokenizer: every file of a real verifier, in a second.

    from tests.tiny import make_verifier
    make_verifier(tmp_path / "shallow", layers=3, seed=1)

Transformers and vLLM's CPU engine both load it. Its answers are gibberish, but they depend on the whole prompt and
do not settle on one token, so a wrong position, mask or layer shows in them.
"""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML as most checkpoints ship it: without `{% generation %}` marks."""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>"]
"""Ids 0 to 3; `<|im_end|>` (2) ends a turn, `<mask>` (3) appears in no chat."""

EOS_TOKEN_ID = 2
MASK_TOKEN_ID = 3
HEAD_SIZE = 32

TEXT = """The system answers the user. A user asks the assistant a question and the assistant writes an answer.
Once upon a time there was a small house near the river, and in the house lived an old woman with three children.
Write a function that returns the sum of two numbers: def add(first, second): return first + second
for index in range(10): print(index, values[index]) if index in values else None
The capital of France is Paris. Water boils at one hundred degrees. The moon moves around the earth.
If Tom has 12 apples and gives 5 to Anna, how many apples are left? 12 - 5 = 7, so the answer is 7.
What would you like to eat today? I would like some soup, please. Thank you very much, that is kind of you.
They walked through the forest until the evening came, then they made a fire and told each other stories.
Please explain how the engine works, step by step, and then give an example of when it would not work at all.
Some people think that winter is the best season because of the snow; others prefer the warm days of summer.
"""


def make_tokenizer(directory: Path, vocab: int = 512, template: str | None = CHATML) -> int:
    """Train a byte-level BPE tokenizer on `TEXT` and save it, chat template included.

    Returns:
        The number of its tokens: `vocab`, or fewer where `TEXT` yields no more merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<mask>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(directory)
    return len(fast)


def make_verifier(
    directory: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    vocab: int = 512,
    seed: int = 0,
    template: str | None = CHATML,
    dtype: str = "float32",
    tied: bool = True,
    max_shard_size: str = "1GB",
) -> Path:
    """Write a random Llama with tokenizer, chat template and generation config to `directory`.

    Args:
        layers: decoder layers.
        hidden: hidden size, a multiple of 32 (heads of 32, one key/value head).
        vocab: tokens of tokenizer and model.
        seed: of the weights; another seed is another verifier of the same shape.
        template: chat template; None writes none.
        dtype: of the saved weights.
        tied: the output head is the embedding.
        max_shard_size: a small one ("200KB") writes several shards with an index.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    size = make_tokenizer(directory, vocab, template)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # Layers that outweigh the embedding in the residual stream: otherwise a tied head answers each token with itself.
                if weight.dim() == 2:
                    weight.normal_(0.0, 0.3 if "embed" in name or "lm_head" in name else 1.5 / weight.shape[1] ** 0.5)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=EOS_TOKEN_ID, pad_token_id=0)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
