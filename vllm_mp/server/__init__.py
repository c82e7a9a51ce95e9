"""The HTTP server: OpenAI's endpoints over an `AsyncLLM`, in a process of its own that lives on when the core dies.

`app.py` puts the parts together. Each group of endpoints is one module with its `ROUTES`; an endpoint reads its body
with `body.read_body`, raises `errors.ApiError`, and finds the engine and all that requests share in
`request.app.state.server`, a `ServerState`.
"""
