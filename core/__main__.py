"""`python -m vllm_mp.core`: one core process, which reads its launch line on standard input."""

import logging
import os

from vllm_mp.core.process import main

exit_code = main()
logging.shutdown()
# Everything is closed. The usual exit would destroy torch's objects for half a second while the parent waits.
os._exit(exit_code)
