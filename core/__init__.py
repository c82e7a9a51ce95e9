"""The EngineCore process.

`process` is its life from launch to end, `engine_core` its loop. `ipc` is its end of the wire, `scheduler` chooses each
step, `worker` computes it with a model from `models` and its `weights`.
"""
