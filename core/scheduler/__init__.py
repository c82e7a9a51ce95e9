"""Which requests run in each step, and which blocks of the KV cache they use.

Start at `scheduler.Scheduler`, the policy. It asks a `waiting_queue.WaitingQueue` and a
`cache.kv_cache_manager.KVCacheManager`, writes the rows of a `batch.Batch`, and owns the queue of pending steps.
`step` has the data of a step. `pause.Pause` serves the calls that pause and resume.
"""
