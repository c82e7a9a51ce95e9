"""The log of the programs of this package, on standard error."""

import logging
import os

LEVEL_VARIABLE = "VLLM_MP_LOG_LEVEL"


def set_up_log(is_service: bool = False) -> None:
    """Write warnings to standard error; of a service also what this package does, with the time of each line.

    `$VLLM_MP_LOG_LEVEL` sets another level for all loggers. Raises ValueError if there is no such level.
    """
    level = os.environ.get(LEVEL_VARIABLE)
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=(level or "WARNING").upper(), format=f"%(asctime)s {form}" if is_service else form)
    if is_service and not level:
        logging.getLogger("vllm_mp").setLevel(logging.INFO)
