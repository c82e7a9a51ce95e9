"""A stand-in for a core: it speaks the wire, and answers each request with recorded tokens of a real model.

`python -m vllm_mp.replay_core --listen ADDRESS` starts one; `AsyncLLM.connect(ADDRESS)` attaches to it. It loads no
torch and no weights, so that what a client and a server cost can be measured and tested apart from the model.
`answers` has the recorded tokens, `streams` the live requests of a client, `core` the loop.
"""
