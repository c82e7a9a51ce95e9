"""`python -m vllm_mp.core`: one core process, which reads its launch line on standard input."""

import logging
import os

from vllm_mp.core.process import main

code = main()
logging.shutdown()
# Everything is closed. Destroying torch's objects one by one would delay the parent by half a second more.
os._exit(code)
