"""What tools use, alone or with tests: engines and models to test, methods that find errors, and measurements.

`engines` runs small real engines and standalone cores, `random_models` saves small models of every architecture, and
`prompts` holds prompts of many kinds. `greedy_parity` checks greedy outputs against transformers, `differential` checks
random requests in a batch against the same requests alone, `faults` checks streams while faults strike the core,
`fuzzing` sends hostile frames, and `mutations` tries faults in the code. `measuring` holds loads, peers and reports of
benchmarks. Nothing here is part of the wheel.

This package imports none of its modules, because some need packages that others do not.
"""
