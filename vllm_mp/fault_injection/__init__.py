"""Faults that a core injects into itself.

`faults` is the language of the option `fault_injection`; `hooks` lets the faults strike in a core, and `device_faults`
makes a CUDA device fail. Only `faults` is loaded unless the option is set.
"""

from vllm_mp.fault_injection.faults import ACTIONS, Fault, mark_of_strike, parse_faults

__all__ = ["ACTIONS", "Fault", "mark_of_strike", "parse_faults"]
