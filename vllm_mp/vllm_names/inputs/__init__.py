"""The forms of a prompt, where programs for vLLM import them from."""

from vllm_mp import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
from vllm_mp.arguments.unserved_names import refuse

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]

__getattr__ = refuse(
    __name__,
    {
        **dict.fromkeys(
            ("ExplicitEncoderDecoderPrompt", "build_explicit_enc_dec_prompt", "zip_enc_dec_prompts"),
            "no model that is served has an encoder and a decoder",
        ),
        **dict.fromkeys(("DataPrompt", "ProcessorInputs", "SingletonPrompt", "token_inputs"), "use PromptType"),
        "INPUT_REGISTRY": "docs/internals/adding_a_model.md says how a model is added",
        "StreamingInput": "give the whole prompt, or start the next request when more of it is known",
    },
)
