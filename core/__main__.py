import logging
import os

from vllm_mp.core.process import main

code = main()
logging.shutdown()
# Everything is closed; taking torch apart object by object would cost the caller half a second more.
os._exit(code)
