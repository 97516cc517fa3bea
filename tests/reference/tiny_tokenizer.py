"""One tiny byte-level tokenizer shared by all tiny checkpoints.

It has exactly `VOCAB_SIZE` tokens, so any id a tiny model emits can be decoded:

    [0, 5)      special tokens, never produced by tokenising plain text
    [5, 261)    one token per byte: every text round-trips
    [261, 512)  pairs of frequent letters

The pairs matter: a text cut in two may tokenise differently from the whole, as with
real tokenizers, so a delimiter handled after tokenisation would be noticed.
"""

from itertools import product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, TURN_START, TURN_END)
FIRST_TEXT_ID = len(SPECIAL_TOKENS)
PAD_ID, BOS_ID, EOS_ID, TURN_START_ID, TURN_END_ID = range(FIRST_TEXT_ID)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer; the same vocabulary on every call.

    Returns:
        A fast tokenizer of `VOCAB_SIZE` tokens with bos, eos, pad and a chat
        template. It adds no special token on its own.
    """
    letters = "etaoinshrdlucmfw"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = VOCAB_SIZE - FIRST_TEXT_ID - len(alphabet)
    merges = list(product(letters, letters))[:num_merges]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
