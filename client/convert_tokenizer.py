"""`python -m vllm_mp.client.convert_tokenizer SOURCE TARGET`: write a folder's tokenizer as a tokenizer.json.

A process of its own, because finding out which tokenizer a folder without tokenizer.json holds takes `AutoTokenizer`,
which loads torch.
"""

import sys

NO_FAST_TOKENIZER = 3
"""Exit code: the tokenizer exists in Python only, and nothing was written."""


def main(source: str, target: str) -> int:
    from transformers import AutoTokenizer

    # Not left out: with None the library asks on the terminal.
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        return NO_FAST_TOKENIZER
    tokenizer.save_pretrained(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
