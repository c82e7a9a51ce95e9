"""Images of prompts: what callers give is decoded and processed in processes beside the client, and placed in prompts.

Start reading at `process_pool.ImageProcesses`; `client/engine/prompt_images.py` makes prompts of the results.
"""
