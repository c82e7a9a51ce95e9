"""Grammars of XGrammar, which computes most of the masks in advance. The library is optional."""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_mp.core.structured_output.grammar import GrammarError, Mask, PreparedConstraint
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer
from vllm_mp.core.structured_output.libraries.lark import closed_schema, is_gbnf, parse_json
from vllm_mp.core.structured_output.libraries.structural_tag import current_form
from vllm_mp.core.structured_output.libraries.xgrammar_schema import check_schema
from vllm_mp.core.structured_output.schema.json_schema import drop_annotations
from vllm_mp.core.structured_output.schema.schema_place import schema_members
from vllm_mp.requests.structured_outputs import Constraint

if TYPE_CHECKING:
    import xgrammar

_SOURCE_LINE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_MAX_ERROR = 1000
_MAX_WHITESPACE = 36
"""Characters of whitespace between two parts of JSON. Without a bound, a model may write whitespace until its tokens
run out."""


class XGrammarMatcher:
    """Where the output of a request stands in its grammar."""

    def __init__(self, matcher: "xgrammar.GrammarMatcher", tokenizer: GrammarTokenizer) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(tokenizer.source.eos_token_ids)
        self._num_words = (tokenizer.source.vocab_size + 31) // 32
        self._last_word = np.int32(-1 if (rest := tokenizer.source.vocab_size % 32) == 0 else (1 << rest) - 1)

    def accept(self, tokens: Sequence[int]) -> None:
        matcher = self._matcher
        for position, token in enumerate(tokens):
            if matcher.is_terminated():
                if token not in self._eos_token_ids:
                    raise GrammarError(f"token {token} at position {position} is not allowed: the output has ended")
            elif not matcher.accept_token(token):
                raise GrammarError(f"token {token} at position {position} is not allowed by the grammar")

    def fill(self, mask: Mask) -> None:
        if len(mask) > self._num_words:
            mask[self._num_words :] = 0
            mask = mask[: self._num_words]
        if self._matcher.is_terminated():
            mask[:] = 0
            for token in self._eos_token_ids:
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        else:
            self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))
            mask[-1] &= self._last_word  # the library allows the ids that do not exist

    def forced(self) -> list[int]:
        if self._matcher.is_terminated():
            return []
        text = self._matcher.find_jump_forward_string()
        # The last token of the text may become another together with the text that follows.
        return self._tokenizer.llguidance().tokenize_str(text)[:-1] if text else []


class XGrammarGrammar:
    """A grammar, with its masks."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", tokenizer: GrammarTokenizer) -> None:
        self.num_bytes: int = compiled.memory_size_bytes
        self._compiled = compiled
        self._tokenizer = tokenizer

    def matcher(self) -> XGrammarMatcher:
        import xgrammar

        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._tokenizer)


class XGrammarBackend:
    """Compiles constraints with XGrammar, which releases the interpreter lock meanwhile.

    Without any whitespace, JSON has a space after each comma and colon, because the library does not keep to other
    separators in values without a schema.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None

    def load(self) -> None:
        self._loaded()

    def prepare(self, constraint: Constraint) -> PreparedConstraint:
        """Return the constraint in the library's form. Raises GrammarError if the library would not enforce it."""
        if constraint.whitespace_pattern:
            raise GrammarError("xgrammar has no whitespace_pattern; leave it out, or use the backend llguidance")
        text = constraint.text
        match constraint.kind:
            case "json":
                schema = parse_json("the JSON schema", text)
                notes = drop_annotations(schema)
                check_schema(schema)
                return PreparedConstraint(
                    "xgrammar",
                    json.dumps(schema),
                    "json",
                    constraint.any_whitespace,
                    constraint.additional_properties,
                    tuple(notes),
                )
            case "json_object":
                return PreparedConstraint("xgrammar", '{"type":"object"}', "json", constraint.any_whitespace)
            case "choice":
                choices = " | ".join(json.dumps(choice) for choice in parse_json("the list of choices", text))
                return PreparedConstraint("xgrammar", f"root ::= {choices}", "ebnf")
            case "grammar":
                return PreparedConstraint("xgrammar", text, "ebnf" if is_gbnf(text) else "lark")
            case "structural_tag":
                tag = parse_json("the structural tag", text)
                if not constraint.additional_properties:
                    tag = closed_schema(tag)
                tag_notes: list[str] = []
                for place, schema in _schemas_of(tag):
                    tag_notes += drop_annotations(schema)
                    check_schema(schema, place)
                if isinstance(tag, dict) and "structures" in tag:
                    tag = {"type": "structural_tag", "format": current_form(tag)}
                return PreparedConstraint("xgrammar", json.dumps(tag), "structural_tag", notes=tuple(tag_notes))
            case "regex":
                return PreparedConstraint("xgrammar", text, "regex")

    def compile(self, prepared: PreparedConstraint) -> XGrammarGrammar:
        """Return the grammar of a constraint. Raises GrammarError if it cannot be compiled."""
        compiler = self._loaded()
        try:
            match prepared.form:
                case "json":
                    compiled = compiler.compile_json_schema(
                        prepared.text,
                        any_whitespace=prepared.any_whitespace,
                        strict_mode=not prepared.additional_properties,
                        max_whitespace_cnt=_MAX_WHITESPACE if prepared.any_whitespace else None,
                    )
                case "regex":
                    compiled = compiler.compile_regex(prepared.text)
                case "ebnf":
                    compiled = compiler.compile_grammar(prepared.text)
                case "lark":
                    compiled = compiler.compile_lark(prepared.text)
                case "structural_tag":
                    compiled = compiler.compile_structural_tag(prepared.text)
        except (RuntimeError, ValueError, TypeError) as error:
            text = re.sub(r"\s+", " ", _SOURCE_LINE.sub("", str(error))).strip()
            raise GrammarError(text[:_MAX_ERROR] or type(error).__name__) from error
        grammar = XGrammarGrammar(compiled, self._tokenizer)
        mask = np.zeros((self._tokenizer.source.vocab_size + 31) // 32, np.int32)
        grammar.matcher().fill(mask)
        if not mask.any():
            raise GrammarError("the grammar matches no text")
        prepared.log_notes()
        return grammar

    def _loaded(self) -> "xgrammar.GrammarCompiler":
        with self._lock:
            if self._compiler is None:
                import xgrammar

                metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(self._tokenizer.text())
                info = xgrammar.TokenizerInfo(
                    self._tokenizer.vocabulary(),
                    metadata["vocab_type"],
                    vocab_size=self._tokenizer.source.vocab_size,
                    stop_token_ids=list(self._tokenizer.source.eos_token_ids),
                    add_prefix_space=metadata["add_prefix_space"],
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler


def _schemas_of(tag: Any) -> Iterator[tuple[str, Any]]:
    """Return (place, schema) of the JSON schemas in a structural tag."""
    for place, key, value in schema_members(tag):
        if key in ("json_schema", "schema") and "/properties/" not in place:
            yield place, value
