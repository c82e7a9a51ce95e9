import sys

from vllm_mp.core.process import main

sys.exit(main())
