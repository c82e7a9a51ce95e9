"""Small tokenizers of the kinds that models have, trained in a moment."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The quick brown fox jumps over the lazy dog 1234 times.",
    "def f(x):\n    return x  # 3.14",
    "Größe, naïve café, 你好，世界 😀 안녕하세요 ﬁ",
    "          indented\n\n\n\tand long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]


def byte_level(normalizer: normalizers.Normalizer | None = None, splits: bool = False) -> Tokenizer:
    """Return a byte-level BPE; with `splits` its pre-tokenizer is a sequence with a regular expression."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    pattern = Regex(r"\s+|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+")
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), level]) if splits else level
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def byte_fallback() -> Tokenizer:
    """Return a BPE as SentencePiece makes it, which writes a space as ▁ and unknown characters as bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(["the quick brown fox"] * 3, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = sorted(trained.get_vocab(), key=len)
    vocab = {piece: number for number, piece in enumerate(["<unk>", *bytes_, *pieces])}
    merges = [
        (piece[:i], piece[i:])
        for piece in pieces
        for i in range(1, len(piece))
        if {piece[:i], piece[i:]} <= vocab.keys()
    ]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def word_pieces() -> Tokenizer:
    """Return a tokenizer that removes spaces, as BERT has it."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        TEXTS * 3,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


def unigram() -> Tokenizer:
    """Return a tokenizer as SentencePiece makes it, which joins unknown characters to one token."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        TEXTS * 3,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    return backend


def with_begin(backend: Tokenizer) -> Tokenizer:
    """Return `backend`, which now begins each text with the special token <s>."""
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def transformers_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `transformers` around `backend`."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=8)
