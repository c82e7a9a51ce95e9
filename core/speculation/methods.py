"""The methods of drafting by their names."""

from vllm_mp.config import SpeculativeConfig
from vllm_mp.core.speculation.ngram import NgramProposer
from vllm_mp.core.speculation.proposer import Proposer
from vllm_mp.core.speculation.suffix import SuffixProposer


def make_proposer(config: SpeculativeConfig) -> Proposer:
    """Return the proposer of the method that `config` names, which reads texts and needs no draft model."""
    if config.method == "suffix":
        return SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
