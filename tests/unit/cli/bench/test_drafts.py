"""What `bench` says about drafts."""

import asyncio

from vllm_mp.cli.bench.drafts import print_drafts, read_drafts


class Engine:
    def __init__(self, **status):
        self.status = {"step": 7, **status}

    async def core_status(self):
        return self.status


def test_drafts_are_printed_with_the_share_that_was_accepted(capsys):
    engine = Engine(
        num_drafts=500, num_draft_tokens=2000, num_accepted_tokens=1500, num_accepted_tokens_per_pos=[1100, 400]
    )
    print_drafts(asyncio.run(read_drafts(engine)))
    assert capsys.readouterr().out == "drafts: 2,000 tokens, 1,500 accepted (75 %); by position 1,100 400\n"


def test_nothing_is_printed_without_speculation(capsys):
    figures = asyncio.run(read_drafts(Engine()))
    print_drafts(figures)
    assert figures == {}
    assert capsys.readouterr().out == ""
