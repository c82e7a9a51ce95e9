"""The tokenizer in a GGUF file: what transformers makes of it, corrected where the file and llama.cpp say otherwise.

A vocabulary is byte-level BPE (`tokenizer.ggml.model` "gpt2"), where ordinary tokens are spelled in the byte alphabet
and control tokens as they are; or SentencePiece ("llama"), where a space is "▁".
"""

from pathlib import Path
from typing import Any, Final

import gguf

_OWN_ARCHITECTURES: Final = ("granite", "olmo2", "qwen2vl")
"""Architectures that transformers does not know in GGUF files, and whose tokenizers are byte-level BPE."""
_DIGIT_SPLITS: Final = (
    "refact",
    "starcoder",
    "smollm",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
)
"""Names of the split of GPT-2 in which each digit stands alone."""
_PLAIN_SPLITS: Final = (None, "default", "gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
"""Names of the split of GPT-2; older files have none."""
_LLAMA_3_SPLITS: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
"""Names of splits whose parts become tokens without any merges if the vocabulary has them; texts begin with BOS."""
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The split named "qwen2", of texts in the normal form C."""
_CASED_LETTERS: Final = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Ranges of letters that have a case, as DeepSeek-LLM lists them."""
_REGEX_SPLITS: Final = {
    "qwen2": (_QWEN2_SPLIT,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u0800-\u9fa5\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
}
"""Splits in steps: each cuts the parts of the step before it at the matches of its regular expression."""
_RANKS: Final = {"tokenizer.ggml.scores", "tokenizer.ggml.merges"}
"""A vocabulary of SentencePiece needs one of them."""
_KEEP_SPACE_IN_PHI3: Final = ("<unk>", "<s>", "<|endoftext|>")
"""The only added tokens of Phi-3's SentencePiece vocabulary that leave the white space after them in the text."""
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens in `tokenizer.ggml.token_type`."""

_ENDS: Final = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>"),
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[EOS]"),
    *("<EOT>", "_<EOT>", "[EOT]"),
)
"""The texts of tokens that end a turn or a text, as in llama.cpp; many files name only one of the tokens that do.

"</s>" is not among them, because Gemma's vocabulary has it as an HTML tag.
"""
_SPECIAL_TOKENS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def read_tokenizer(source: Path, reader: gguf.GGUFReader) -> Any:
    """Return the tokenizer, of transformers, that is in the file `source`, which `reader` has read.

    Raises ValueError, naming the field, for a way to split text that is not known, and for a vocabulary that is missing
    or contradicts itself.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _check(reader)
    is_own = str(_value(reader, "general.architecture")) in _OWN_ARCHITECTURES
    tokenizer_class: Any = PreTrainedTokenizerFast if is_own else AutoTokenizer
    tokenizer = tokenizer_class.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    model = _value(reader, "tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(tokenizer, reader)
    elif model == "llama":
        _use_prefix_of_file(tokenizer, reader)
        if _value(reader, "general.architecture") == "phi3":
            _strip_space_after_tokens_of_phi3(tokenizer)
    _use_special_tokens_of_file(tokenizer, reader)
    return tokenizer


def token_id(reader: gguf.GGUFReader, key: str) -> int | None:
    """Return the token id that the file has under `key`; None if it has none, or one without a token."""
    value, tokens = _value(reader, key), reader.fields.get("tokenizer.ggml.tokens")
    return value if type(value) is int and tokens is not None and 0 <= value < len(tokens.data) else None


def end_token_ids(reader: gguf.GGUFReader) -> list[int]:
    """Return the ids of the tokens that end a generation: those that the file names, then those in `_ENDS`."""
    tokens, kinds = (_value(reader, f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
    named = (token_id(reader, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    known = (
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token in _ENDS
    )
    return list(dict.fromkeys(token for token in (*named, *known) if token is not None))


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    try:
        return None if field is None else field.contents()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key} has {error.object[:40]!r}, which is not UTF-8; convert the model again") from None


def _check(reader: gguf.GGUFReader) -> None:
    """Raise ValueError unless the file has tokens, and as many scores and types if it has any."""
    tokens = _value(reader, "tokenizer.ggml.tokens")
    if not (isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens)):
        raise ValueError(
            "tokenizer.ggml.tokens is not a list of texts: the file has no vocabulary; convert the model again"
        )
    for key, kind in (("scores", float), ("token_type", int)):
        values = _value(reader, f"tokenizer.ggml.{key}")
        if values is None:
            continue
        if not (isinstance(values, list) and len(values) == len(tokens) and all(type(item) is kind for item in values)):
            raise ValueError(
                f"tokenizer.ggml.{key} is not a list of {len(tokens)} numbers, one for each of tokenizer.ggml.tokens; "
                "convert the model again"
            )
    if _value(reader, "tokenizer.ggml.model") == "llama" and not reader.fields.keys() & _RANKS:
        raise ValueError("tokenizer.ggml.scores is missing; convert the model again")
    known = set(tokens)
    for merge in _merges(reader):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= known:
            raise ValueError(
                f"tokenizer.ggml.merges has {' '.join(merge)!r:.80}, whose parts or whole are no tokens; convert the "
                "model again"
            )


def _merges(reader: gguf.GGUFReader) -> list[list[str]]:
    return [merge.split(" ") for merge in _value(reader, "tokenizer.ggml.merges") or []]


def _byte_level(tokenizer: Any, reader: gguf.GGUFReader) -> Any:
    """Return `tokenizer` with the vocabulary as it is in the file, and its way to split text.

    transformers respells control tokens that have other characters than bytes have (DeepSeek's), so that they are cut
    into pieces, and BOS gets an id outside of the vocabulary.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = _value(reader, "tokenizer.ggml.pre")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [(left, right) for left, right in _merges(reader)]
    backend = tokenizer.backend_tokenizer
    exact = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _LLAMA_3_SPLITS))
    exact.normalizer, exact.decoder = backend.normalizer, backend.decoder
    exact.pre_tokenizer = backend.pre_tokenizer
    if split in _DIGIT_SPLITS:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        exact.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif split in _REGEX_SPLITS:
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _REGEX_SPLITS[split]]
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        exact.pre_tokenizer = pre_tokenizers.Sequence([*steps, alphabet])
        if split == "qwen2":
            exact.normalizer = normalizers.NFC()
    elif split not in _PLAIN_SPLITS and "Regex" not in repr(backend.pre_tokenizer):
        known = ", ".join(
            sorted(name for name in (*_PLAIN_SPLITS, *_DIGIT_SPLITS, *_LLAMA_3_SPLITS, *_REGEX_SPLITS) if name)
        )
        raise ValueError(
            f"tokenizer.ggml.pre is {split!r:.80}, a way to split text that is not known here for the architecture "
            f"{_value(reader, 'general.architecture')!r:.80} (known are {known}); converting the file again does not "
            "change it: use the tokenizer of the original model"
        )
    for token, kind in zip(tokens, _value(reader, "tokenizer.ggml.token_type") or (), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            exact.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    adds_bos = _value(reader, "tokenizer.ggml.add_bos_token")
    special = {
        name: None if (index := token_id(reader, key)) is None else tokens[index]
        for name, key in _SPECIAL_TOKENS.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=exact,
        chat_template=tokenizer.chat_template,
        add_bos_token=split in _LLAMA_3_SPLITS if adds_bos is None else bool(adds_bos),
        add_eos_token=bool(_value(reader, "tokenizer.ggml.add_eos_token")),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _use_prefix_of_file(tokenizer: Any, reader: gguf.GGUFReader) -> None:
    """Put a space before a text of SentencePiece, even if it begins with one, unless the file says otherwise."""
    from tokenizers import decoders, normalizers

    if str(_value(reader, "general.architecture")).startswith("gemma"):
        return  # without a space, and with tokens of several spaces that transformers handles
    has_prefix = _value(reader, "tokenizer.ggml.add_space_prefix") is not False
    backend = tokenizer.backend_tokenizer
    spaces = normalizers.Replace(pattern=" ", content="▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(prepend="▁"), spaces]) if has_prefix else spaces
    backend.pre_tokenizer = None
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if has_prefix else parts)


def _strip_space_after_tokens_of_phi3(tokenizer: Any) -> None:
    """Drop the white space after added tokens, as the original tokenizer does: a GGUF file has no field for it."""
    from tokenizers import AddedToken

    backend = tokenizer.backend_tokenizer
    backend.add_tokens(
        [
            AddedToken(token.content, rstrip=True, normalized=token.normalized, special=token.special)
            for token in backend.get_added_tokens_decoder().values()
            if token.content not in _KEEP_SPACE_IN_PHI3
        ]
    )


def _use_special_tokens_of_file(tokenizer: Any, reader: gguf.GGUFReader) -> None:
    """Make the tokenizer use the special tokens that the file names.

    Some versions of transformers guess them from the tokens' names, and mistake the start of a message for its end.
    """
    for name, key in _SPECIAL_TOKENS.items():
        token = token_id(reader, key)
        if token is not None and getattr(tokenizer, f"{name}_id") != token:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
