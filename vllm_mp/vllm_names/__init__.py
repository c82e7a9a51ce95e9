"""Modules under the names that programs import from vLLM, such as `vllm_mp.v1.engine.async_llm`.

This folder is on the path of the package `vllm_mp`, so its modules are imported without its name; a wheel holds them in
the package itself. They import one another by relative imports, which work in both.
"""
